"""Every engine trains bit-identical weights on the same number of ranks, and equal up to rounding on other numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, largest_difference, result_of, weights_of
from processes import assert_rejected
from torch.nn.parallel import DistributedDataParallel

from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.comparison.equality import Run, compare_runs, first_difference
from lit_mnist.distributed import ddp_arguments
from lit_mnist.plugins.exact_entry import KEY

DISTRIBUTED = ("raw_ddp", "lightning", "fabric", "with_accelerate", "with_hf_trainer")
SMALL = (
    *("--data.val_size", 48, "--data.test_size", 101, "--data.augment", "affine"),
    *("--run.trace", "steps", "--run.threads", 1),
)
SGD = ("--model.optimizer", "sgd", "--lr", 0.05)
ADAMW = ("--model.optimizer", "adamw", "--lr", 0.001, "--model.weight_decay", 0.01)


def trained(program: Program, engine: str, *flags: object) -> Run:
    return Run.read(program.train(*SMALL, *flags, engine=engine))


def assert_equal(runs: dict[str, Run]) -> None:
    """Asserts that all ranks of all runs did the same, in every bit of every step."""
    (name, reference), *others = runs.items()
    assert reference.ranks_agree, name
    for other, run in others:
        found = first_difference(reference, run)
        assert found is None, f"{other} against {name}: {found}"
        assert run.result["weights_sha256"] == reference.result["weights_sha256"]
        assert run.result["test"]["confusion"] == reference.result["test"]["confusion"]
        assert compare_runs(reference, run, expected="bits")["met"]


NETS, OPTIMIZERS, WINDOWS, RANKS = ("convnet", "basicnet"), (SGD, ADAMW), (1, 4), (2, 3, 4)
CASES = list(itertools.product(NETS, OPTIMIZERS, WINDOWS, RANKS, ("32-true", "bf16-mixed")))


def name_of(case: tuple[str, tuple[object, ...], int, int, str]) -> str:
    net, optimizer, window, ranks, precision = case
    return f"{net}, {optimizer[1]}, windows of {window}, {ranks} ranks, {precision}"


# No engine asks a library for what it is going to take away: it would tell so in every run.
@pytest.mark.slow
@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_engines_train_the_same_bits(program: Program, case: tuple[str, tuple[object, ...], int, int, str]) -> None:
    net, optimizer, window, ranks, precision = case
    # Nine micro-batches: with an accumulation of four the last window of an epoch has one.
    batch = 12
    flags = ("--model.net", net, *optimizer, "--trainer.accumulate_grad_batches", window, "--devices", ranks)
    size = ("--batch-size", batch, "--data.train_size", 9 * batch + 5, "--epochs", 2, "--precision", precision)
    # A few steps of the second epoch, too.
    clip = ("--trainer.gradient_clip_val", 0.5, "--max-steps", 12 if window == 1 else 4)
    runs = {engine: trained(program, engine, *flags, *size, *clip) for engine in DISTRIBUTED}
    assert_equal(runs)
    servers = trained(program, "parameter_server", *flags, *size, *clip, "--servers", 2)
    assert servers.ranks_agree
    # Adam makes a whole step of a rounding error in a gradient near zero.
    expected = "1e-05 relative" if optimizer is SGD else "rounding"
    assert compare_runs(runs["raw_ddp"], servers, expected=expected)["met"]


def test_one_rank_trains_the_same_bits_with_and_without_a_process_group(program: Program) -> None:
    flags = ("--devices", 1, *SGD, "--batch-size", 32, "--data.train_size", 160, "--trainer.accumulate_grad_batches", 2)
    assert_equal({engine: trained(program, engine, *flags) for engine in ("single", *DISTRIBUTED, "parameter_server")})


def test_overflowing_steps_are_left_out_by_every_engine_alike(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.amp.GradScaler.__init__

    def large(self: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
        original(self, *args, **{**kwargs, "init_scale": 2.0**22})  # type: ignore[arg-type]

    monkeypatch.setattr(torch.amp.GradScaler, "__init__", large)
    flags = ("--devices", 2, *SGD, "--batch-size", 8, "--data.train_size", 80, "--trainer.gradient_clip_val", 1.0)
    words = (*flags, "--precision", "16-mixed", "--max-steps", 10)
    runs = {engine: trained(program, engine, *words) for engine in ("raw_ddp", "lightning", "fabric")}
    assert_equal(runs)
    for run in runs.values():
        assert 0 < run.result["skipped_steps"] < 10
        assert run.result["skipped_steps"] == runs["raw_ddp"].result["skipped_steps"]


def note_ddp(monkeypatch: pytest.MonkeyPatch, notes: Path) -> None:
    """Writes down with what the ranks' networks are wrapped."""
    original = DistributedDataParallel.__init__

    def noted(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        with notes.open("a") as file:
            file.write(f"{self.gradient_as_bucket_view} {self.static_graph} {self.find_unused_parameters}\n")

    monkeypatch.setattr(DistributedDataParallel, "__init__", noted)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 4])
def test_every_engine_passes_the_ddp_arguments_for_gpus_with_bit_identical_results(
    program: Program, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """From three ranks on a static graph adds up in another order than DDP's default: so all must say it, or none."""
    flags = ("--devices", 3, *SGD, "--batch-size", 12, "--data.train_size", 113, "--max-steps", 5)
    words = (*flags, "--trainer.accumulate_grad_batches", window, "--trainer.gradient_clip_val", 0.5)
    notes = program.folder / "notes"
    note_ddp(monkeypatch, notes)
    trained(program, "raw_ddp", *words)
    assert set(notes.read_text().splitlines()) == {"False False False"}
    monkeypatch.setattr(ddp_arguments, "_OPTIMIZED_DEVICES", frozenset({"cpu"}))
    runs = {}
    for engine in DISTRIBUTED:
        notes.unlink()
        runs[engine] = trained(program, engine, *words)
        assert notes.read_text().splitlines() == 3 * [f"True {window == 1} False"], engine
    assert_equal(runs)


@pytest.mark.slow
@pytest.mark.parametrize("variable", [None, "4"])
def test_two_threads_for_each_rank_train_the_same_bits(
    program: Program, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    flags = ("--devices", 2, *SGD, "--batch-size", 32, "--data.train_size", 128, "--run.threads", 2)
    runs = {engine: trained(program, engine, *flags) for engine in DISTRIBUTED[:4]}
    assert_equal(runs)
    assert {run.result["threads"] for run in runs.values()} == {2}


@pytest.mark.slow
def test_without_synchronised_batch_norm_every_engine_evaluates_rank_0_s_network(program: Program) -> None:
    """The ranks have two and three batches to validate on: none may wait for another within an evaluation."""
    uneven = ("--data.val_size", 41, "--data.eval_batch_size", 10, "--trainer.sync_batchnorm", "false")
    flags = ("--devices", 2, *SGD, "--batch-size", 32, "--data.train_size", 128, "--epochs", 2, "--run.trace", "steps")
    results = [
        result_of(program.train(*flags, *uneven, "--data.test_size", 101, engine=engine))
        for engine in (*DISTRIBUTED, "parameter_server")
    ]
    for name in ("weights_sha256", "validation", "test"):
        assert all(result[name] == results[0][name] for result in results[1:]), name


@pytest.mark.parametrize("net", ["convnet", pytest.param("basicnet", marks=pytest.mark.slow)])
def test_one_device_and_two_ranks_differ_by_rounding_alone(program: Program, net: str) -> None:
    flags = ("--precision", "64-true", "--batch-size", 32, "--data.train_size", 960, "--max-steps", 30, *SGD)
    one = trained(program, "single", "--model.net", net, *flags)
    two = trained(program, "raw_ddp", "--devices", 2, "--model.net", net, *flags)
    assert largest_difference(weights_of(one.folder), weights_of(two.folder)) <= 1e-8
    assert compare_runs(two, one, expected="rounding")["met"]


@pytest.mark.parametrize(
    ("batches", "engines"),
    [
        (4, ("raw_ddp",)),
        (3, ("raw_ddp",)),
        pytest.param(3, ("lightning", *DISTRIBUTED[2:], "parameter_server"), marks=pytest.mark.slow),
    ],
)
def test_a_window_s_gradient_is_that_of_one_batch_of_all_its_samples(
    program: Program, batches: int, engines: tuple[str, ...]
) -> None:
    """One step of plain descent at rate 1: the weights move by the gradient. A shorter last window is a mean, too."""
    plain = ("--model.optimizer", "sgd", "--lr", 1, "--model.momentum", 0, "--model.nesterov", "false")
    rest = ("--model.schedule", "constant", "--model.dropout", 0, "--precision", "64-true", "--model.net", "basicnet")
    flags = (*plain, *rest, "--data.train_size", 8 * batches)
    whole = trained(program, "single", *flags, "--batch-size", 8 * batches)
    for engine in engines:
        words = ("--devices", 2, "--batch-size", 8, "--trainer.accumulate_grad_batches", 4)
        parts = trained(program, engine, *flags, *words)
        assert result_of(parts.folder)["steps"] == result_of(whole.folder)["steps"] == 1
        assert largest_difference(weights_of(whole.folder), weights_of(parts.folder)) <= 1e-12


REFUSALS = {
    "two devices for one": ("single", ["--devices", "2"], ["single", "one device", "--devices 1"]),
    "no GPUs": ("data_parallel", ["--devices", "2"], ["data_parallel", "two GPUs"]),
    "float16 by Accelerate": ("with_accelerate", ["--precision", "16-mixed"], ["with_accelerate", "float16"]),
    "float16 by Transformers": ("with_hf_trainer", ["--precision", "16-mixed"], ["with_hf_trainer", "float16"]),
    "float16 by servers": ("parameter_server", ["--precision", "16-mixed"], ["parameter_server", "float16"]),
    "saving by steps": ("fabric", ["--save-every", "5"], ["fabric", "save_every", "raw_ddp"]),
    "restarts": ("parameter_server", ["--devices", "2", "--max-restarts", "1"], ["max_restarts", "raw_ddp"]),
    "callbacks": (
        "raw_ddp",
        ["--trainer.callbacks", "LearningRateMonitor"],
        ["raw_ddp", "trainer.callbacks", "lightning"],
    ),
    "servers": ("raw_ddp", ["--devices", "2", "--servers", "2"], ["raw_ddp", "servers", "parameter_server"]),
    "more servers than ranks": ("parameter_server", ["--devices", "2", "--servers", "3"], ["servers", "3", "2"]),
    "spawn": ("fabric", ["--devices", "2", "--launcher", "spawn"], ["fabric", "spawn", "raw_ddp"]),
    "an evaluation": ("with_accelerate", ["test", "--ckpt", "x"], ["with_accelerate", "test", "raw_ddp"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_an_engine_does_not_offer_is_refused_by_name(program: Program, case: str) -> None:
    engine, words, parts = REFUSALS[case]
    if "--ckpt" in words:
        words = ["test", "--ckpt", str(program.train("--max-steps", 1, *SMALL, engine="single"))]
    assert_rejected(program(*words, engine=engine), *parts)


@pytest.mark.parametrize(
    ("ranks", "engines"),
    [
        (2, ("raw_ddp", "lightning", "raw_ddp")),
        pytest.param(2, ("lightning", "raw_ddp", "lightning"), marks=pytest.mark.slow),
        pytest.param(1, ("single", "lightning"), marks=pytest.mark.slow),
        pytest.param(1, ("lightning", "single", "raw_ddp", "single"), marks=pytest.mark.slow),
    ],
)
def test_an_engine_goes_on_where_another_stopped(program: Program, ranks: int, engines: tuple[str, ...]) -> None:
    """Resumes within an epoch and between its accumulation windows, and ends bit-identically."""
    constant = ("--model.schedule", "constant", *SGD, "--trainer.accumulate_grad_batches", 2, "--batch-size", 32)
    net = "basicnet" if engines[0] == "single" else "convnet"
    size = ("--data.train_size", 32 * 7, "--epochs", 4, "--data.val_size", 48, "--data.test_size", 101)
    size = (*size, "--model.net", net, "--run.threads", 1)
    words = (*constant, *size, "--devices", ranks)
    whole = result_of(program.train(*words, "--max-steps", 11, engine=engines[0]))
    folder = program.train(*words, "--max-steps", 11 - 3 * (len(engines) - 1), engine=engines[0])
    for engine, steps in zip(engines[1:], range(11 - 3 * (len(engines) - 2), 12, 3), strict=True):
        done = program("--resume", folder, "--max-steps", steps, engine=engine)
        assert done.code == 0, done.err
    found = result_of(folder)
    assert found["engine"] == engines[-1]
    assert found["weights_sha256"] == whole["weights_sha256"]
    assert (found["steps"], found["test"]) == (11, whole["test"])


def test_the_engines_checkpoints_are_the_same_but_for_their_names(program: Program) -> None:
    flags = ("--devices", 2, "--batch-size", 8, "--data.train_size", 40, "--max-steps", 8, "--data.test_size", 9, *SGD)
    checkpoints = []
    for engine in ("raw_ddp", "lightning"):
        folder = program.train(*flags, "--precision", "16-mixed", "--epochs", 2, "--data.val_size", 9, engine=engine)
        checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        section = checkpoint["lit_mnist"]
        assert section.pop("engine") == engine
        del section["config"]["run"]
        checkpoints.append(checkpoint)
    raw_ddp, lightning = checkpoints
    assert {*raw_ddp, KEY} == {*lightning}
    # A Trainer counts the end of its last epoch, and the batches of its validation.
    for name in raw_ddp.keys() - {"epoch", "loops"}:
        assert content_sha256(raw_ddp[name]) == content_sha256(lightning[name]), name
