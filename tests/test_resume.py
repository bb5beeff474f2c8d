"""An interrupted training goes on where it was, in or between epochs, and ends with the same bits."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from conftest import Program, largest_difference, result_of, wait_for, weights_of
from test_bad_input import refused

SMALL = ("--data.train_size", 960, "--data.val_size", 100, "--data.test_size", 100, "--batch-size", 96, "--lr", 0.05)


@pytest.mark.parametrize(
    "settings",
    [
        ("--devices", 2, "--model.net", "convnet", "--data.augment", "affine"),
        ("--devices", 2, "--model.net", "basicnet", "--model.optimizer", "adamw", "--lr", 0.001),
        ("--devices", 1, "--precision", "16-mixed", "--batch-size", 96, "--data.train_size", 288),
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
    assert torch.load(last, weights_only=True)["global_step"] == 50
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


@pytest.mark.parametrize("engine", ["lightning", "raw_ddp", "single"])
def test_a_run_killed_within_an_epoch_goes_on_to_the_same_bits(program: Program, engine: str) -> None:
    devices = 1 if engine == "single" else 2
    settings = (*SMALL, "--data.train_size", 4800, "--data.augment", "affine", "--devices", devices)
    whole = program.train(*settings, engine=engine)
    folder = program.folder / "killed"
    last = folder / "checkpoints" / "last.ckpt"
    with program.started(*settings, "--save-every", 7, "--run-dir", folder, engine=engine) as group:
        wait_for(last.exists, 120, program.folder)
        os.killpg(group, signal.SIGKILL)
    step = torch.load(last, weights_only=True)["global_step"]
    assert step % 7 == 0
    assert step < 50
    done = program("--resume", folder, engine=engine)
    assert done.code == 0, done.err
    assert f"after step {step}" in done.out
    assert result_of(folder)["weights_sha256"] == result_of(whole)["weights_sha256"]
    assert result_of(folder)["test"] == result_of(whole)["test"]


def test_other_numbers_of_ranks_go_on_with_the_epoch_s_own_samples(program: Program) -> None:
    """No sample of the epoch is repeated or lost: in 64-bit precision the weights agree but for rounding."""
    settings = (*SMALL[:-2], "--lr", 0.002, "--precision", "64-true", "--model.schedule", "constant")
    whole = weights_of(program.train(*settings, "--devices", 1))
    folder = program.train(*settings, "--devices", 2, "--max-steps", 4)
    done = program("--resume", folder, "--devices", 3, "--max-steps", 10)
    assert done.code == 0, done.err
    assert largest_difference(whole, weights_of(folder)) <= 1e-8


def test_a_checkpoint_elsewhere_goes_on_in_a_folder_of_its_own(program: Program) -> None:
    """Only a run folder is taken up in place: a file that lies anywhere must not make its surroundings one."""
    trained = program.train(*SMALL, "--epochs", 1, "--model.schedule", "constant")
    place = program.folder / "downloads"
    place.mkdir()
    (trained / "checkpoints" / "last.ckpt").rename(place / "some.ckpt")
    before = sorted(path.name for path in program.folder.iterdir())
    done = program("--resume", place / "some.ckpt", "--epochs", 2)
    assert done.code == 0, done.err
    assert "after step 10" in done.out
    assert [path.name for path in place.iterdir()] == ["some.ckpt"]
    assert sorted(path.name for path in program.folder.iterdir() if path.name != "runs") == before
    (folder,) = (program.folder / "runs").iterdir()
    assert result_of(folder)["steps"] == 20


def test_an_evaluation_tells_the_weights_that_it_evaluated(program: Program) -> None:
    trained = program.train(*SMALL, "--epochs", 1)
    for verb in ("test", "validate"):
        found = result_of(program.train(verb, "--ckpt", trained))
        assert found["weights_sha256"] == result_of(trained)["weights_sha256"]
    validation = result_of(program.train("validate", "--ckpt", trained))["validation"]
    assert validation == result_of(trained)["validation"]
    refused(program("validate", "--ckpt", trained, "--seed", 7), "seed_everything")
    refused(program("validate", "--ckpt", trained, "--data.val_size", 50), "data.val_size")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_diverged_training_ends_with_exit_code_4(program: Program, devices: int) -> None:
    folder = program.folder / "diverged"
    done = program(*SMALL[:-2], "--lr", 1e30, "--devices", devices, "--run-dir", folder)
    assert done.code == 4, done.out + done.err
    assert "error: The loss was" in done.err
    assert "Traceback" not in done.err
    assert not (folder / "checkpoints" / "last.ckpt").exists()
