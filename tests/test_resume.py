"""An interrupted training goes on where it was, at the epochs' ends, and ends with the same bits."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from conftest import Program, result_of, wait_for
from test_bad_input import refused

SMALL = ("--data.train_size", 960, "--data.val_size", 100, "--data.test_size", 100, "--batch-size", 96, "--lr", 0.05)


@pytest.mark.parametrize(
    "settings",
    [
        ("--devices", 2, "--model.net", "convnet", "--data.augment", "affine"),
        ("--devices", 2, "--model.net", "basicnet", "--model.optimizer", "adamw", "--lr", 0.001),
        ("--devices", 1, "--precision", "16-mixed", "--batch-size", 160),
        ("--devices", 1, "--trainer.accumulate_grad_batches", 4),
    ],
    ids=["convnet", "basicnet", "float16", "accumulation"],
)
def test_a_constant_schedule_resumed_after_an_epoch_ends_with_the_same_bits(
    program: Program, settings: tuple[object, ...]
) -> None:
    settings = tuple(dict(zip(*[iter((*SMALL, *settings))] * 2, strict=True)).items())
    flags = [word for pair in settings for word in pair]
    flags += ["--model.schedule", "constant"]
    whole = program.train(*flags, "--epochs", 3)
    parts = program.train(*flags, "--epochs", 1)
    done = program("--resume", parts, "--epochs", 3)
    assert done.code == 0, done.err
    assert result_of(parts)["weights_sha256"] == result_of(whole)["weights_sha256"]
    assert result_of(parts)["steps"] == result_of(whole)["steps"]
    assert result_of(parts)["test"] == result_of(whole)["test"]
    columns = [line.split(",")[:5] for line in (whole / "metrics.csv").read_text().splitlines()]
    assert [line.split(",")[0] for line in (parts / "metrics.csv").read_text().splitlines()][-1] == columns[-1][0]


def test_a_killed_one_cycle_run_goes_on_along_its_schedule(program: Program) -> None:
    settings = (*SMALL, "--data.train_size", 4800, "--epochs", 2, "--devices", 2)
    whole = program.train(*settings)
    folder = program.folder / "killed"
    last = folder / "checkpoints" / "last.ckpt"
    with program.started(*settings, "--run-dir", folder) as group:
        wait_for(last.exists, 120)
        os.killpg(group, signal.SIGKILL)
    assert torch.load(last, weights_only=True)["epoch"] == 0
    assert not (folder / "result.json").exists()
    done = program("--resume", folder)
    assert done.code == 0, done.err
    assert result_of(folder)["weights_sha256"] == result_of(whole)["weights_sha256"]
    assert result_of(folder)["steps"] == 100


def test_what_would_be_another_training_is_refused(program: Program) -> None:
    trained = program.train(*SMALL, "--epochs", 1)
    refused(program("--resume", trained), "10 steps", "nothing to go on with")
    refused(program("--resume", trained, "--epochs", 2), "onecycle", "cannot be stretched to 20")
    refused(program("--resume", trained, "--lr", 0.5), "model.lr", "0.5", "0.05")
    refused(program("--resume", trained, "--model.net", "basicnet"), "model.net", "basicnet", "convnet")
    refused(program("--resume", trained, "--data.val_size", 0), "data.val_size")
    refused(program("--resume", trained, "--seed", 1), "seed_everything")
    refused(program("test", "--ckpt", trained, "--model.net", "basicnet"), "model.net", "basicnet", "convnet")


def test_the_saved_configuration_repeats_the_run(program: Program) -> None:
    first = program.train(*SMALL, "--devices", 2, "--epochs", 1)
    again = program.train("--config", first / "config.yaml")
    assert result_of(again)["weights_sha256"] == result_of(first)["weights_sha256"]
    assert result_of(again)["world_size"] == 2
