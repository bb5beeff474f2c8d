"""`compare` reports which engines train the same weights, and where two engines first differ."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program
from processes import assert_rejected

import lit_mnist
from lit_mnist.comparison.results import lines_of_code
from lit_mnist.comparison.runs import choose_variants
from lit_mnist.comparison.summary import text
from lit_mnist.engines import fabric
from lit_mnist.errors import InputError
from lit_mnist.training.job import ExperimentJob

SMALL = (
    "--batch-size",
    24,
    "--data.train_size",
    240,
    "--data.val_size",
    24,
    "--data.test_size",
    101,
    "--run.threads",
    1,
)


def compared(program: Program, *flags: object, code: int = 0, timeout: float = 280) -> dict[str, Any]:
    folder = program.folder / "comparison"
    done = program("compare", "--run-dir", folder, "--repeats", 0, *SMALL, *flags, timeout=timeout)
    assert done.code == code, done.out + done.err
    assert (folder / "comparison.html").read_text().startswith("<!DOCTYPE html>")
    comparison = dict(json.loads((folder / "comparison.json").read_text()))
    assert text(comparison, width=120, color=False).splitlines()[0] in done.out
    ran = [entry for entry in comparison["engines"] if entry["status"] != "skipped"]
    begun = re.findall(r"^engine (\d+)/(\d+)  \S+  training with a trace  \d+:\d\d$", done.out, re.MULTILINE)
    assert begun == [(str(n), str(len(ran))) for n in range(1, len(ran) + 1)]
    return comparison


@pytest.mark.parametrize("steps", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_all_engines_are_bit_identical_on_two_ranks(
    program: Program, steps: int, request: pytest.FixtureRequest
) -> None:
    if steps == 12:
        # The long comparison starts each Python of torchrun.
        request.getfixturevalue("forked_python")
    flags = ("--devices", 2, "--lr", 0.05, "--trainer.accumulate_grad_batches", 2, "--epochs", 40, "--max-steps", steps)
    comparison = compared(program, "--engines", "all", *flags)
    assert comparison["equal"] is True
    assert comparison["reference"] == "raw_ddp (own launcher)"
    found = {(entry["name"], entry["variant"]): entry for entry in comparison["engines"]}
    assert len(found) == len(comparison["engines"]) == 10
    skipped = {name for (name, _), entry in found.items() if entry["status"] == "skipped"}
    assert skipped == {"data_parallel"}
    assert "two GPUs" in found["data_parallel", None]["reason"]

    reference = found["raw_ddp", "own launcher"]
    assert reference["comparison"] is None
    assert len(reference["loss"]) == comparison["steps"] == steps
    for (name, variant), entry in found.items():
        if name in skipped or entry is reference:
            continue
        checks = entry["comparison"]
        assert checks["met"] is True, (name, variant)
        assert checks["initial_weights"]
        assert checks["samples"]
        assert checks["learning_rate"]
        if name != "single":
            # The hashes of all ranks, not of rank 0 alone.
            assert entry["weights_sha256"] == reference["weights_sha256"], (name, variant)
            assert len(set(entry["weights_sha256"])) == 1
            assert checks["first_difference"] is None
            assert checks["largest_difference"] == 0
            assert entry["loss"] == reference["loss"]
    assert found["single", None]["comparison"]["expected"] == "rounding"
    assert found["single", None]["world_size"] == 1
    _check_traffic({name: entry["cost"] for (name, _), entry in found.items() if entry["status"] == "ran"})


@pytest.mark.parametrize(
    "flags",
    [
        # On another number of ranks sums are rounded differently, whatever the reference is.
        ("--engines", "single,parameter_server"),
        # Each rank has running statistics of its own, in every engine alike.
        ("--engines", "raw_ddp,parameter_server", "--trainer.sync_batchnorm", "false"),
    ],
    ids=["one rank beside servers", "batch norm not synchronized"],
)
def test_expected_differences_are_accepted(program: Program, flags: tuple[str, ...]) -> None:
    comparison = compared(program, *flags, "--devices", 2, "--max-steps", 3)
    assert [entry["status"] for entry in comparison["engines"]] == ["ran", "ran"]
    assert comparison["equal"] is True
    assert (program.folder / "comparison" / "run.lock").read_text() == ""


def _check_traffic(costs: dict[str, dict[str, Any]]) -> None:
    """An accumulation window of two micro-batches: batch norm exchanges eight times, and the gradient travels once."""
    assert costs["raw_ddp"]["collectives_per_step"] == {"all_reduce": 1, "exchange": 8}
    # By itself Lightning would ask before each micro-batch, by a broadcast, whether a signal came.
    calls = costs["lightning"]["collectives_per_step"]
    assert calls.keys() == {"all_reduce", "exchange"}
    assert calls["exchange"] == 8
    # The ranks agree on signals every quarter of a second, which is once per step if a busy machine takes longer.
    assert calls["all_reduce"] in {1, 2}
    servers = costs["parameter_server"]["collectives_per_step"]
    assert (servers["send"], servers["recv"]) == (1, 1)
    assert costs["single"]["collectives_per_step"] == {}
    assert costs["single"]["bytes_sent_per_step"] == 0
    gradient = 4 * 29_034
    for name in ("raw_ddp", "fabric", "with_accelerate", "with_hf_trainer", "lightning"):
        assert gradient < costs[name]["payload_bytes_per_step"] < 1.1 * gradient
        # On two ranks a ring sends half of the data twice.
        assert gradient < costs[name]["bytes_sent_per_step"] < 1.2 * gradient
    assert all(cost["images_per_s"] is None for cost in costs.values())


def momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fabric.make_optimizer

    def changed(*arguments: Any) -> torch.optim.Optimizer:
        optimizer = original(*arguments)
        optimizer.param_groups[0]["momentum"] += 1e-3
        return optimizer

    monkeypatch.setattr(fabric, "make_optimizer", changed)


def epoch_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExperimentJob.train_batches

    def first_epoch(self: ExperimentJob, rank: Any, epoch: int, step: int) -> Any:
        return original(self, rank, 0, 0) if self.engine == "fabric" else original(self, rank, epoch, step)

    monkeypatch.setattr(ExperimentJob, "train_batches", first_epoch)


def batch_norm_not_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "sync_batch_norm", lambda net, *_: net)


def loss_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "window_share", lambda loss, plan, number: loss)


# Ten micro-batches in windows of two: an epoch has five steps. Each deliberate fault, and where it shows first.
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int, str, str | None]] = {
    "momentum": (momentum, 1, "weights", "layer1.0.weight"),
    "epoch": (epoch_not_set, 6, "samples", None),
    "batch norm": (batch_norm_not_synchronized, 1, "loss", None),
    "loss": (loss_not_averaged, 1, "weights", "layer1.0.weight"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name == "loss" else pytest.mark.slow) for name in FAULTS]
)
def test_a_deliberate_difference_is_found_at_its_step_and_named(
    program: Program, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant, step, what, tensor = FAULTS[fault]
    plant(monkeypatch)
    flags = ("--devices", 2, "--trainer.accumulate_grad_batches", 2, "--epochs", 2, "--max-steps", 7)
    comparison = compared(program, "--engines", "raw_ddp,fabric", *flags, code=1)
    assert comparison["equal"] is False
    found = comparison["engines"][1]["comparison"]
    assert found["met"] is False
    difference = found["first_difference"]
    assert (difference["step"], difference["what"], difference["tensor"]) == (step, what, tensor)
    if what != "samples":
        assert difference["by"] > 0
    assert f"step {step}: {what}" in difference["text"]


@pytest.mark.slow
def test_a_timed_comparison_has_medians_of_its_repeats(program: Program) -> None:
    folder = program.folder / "timed"
    flags = ("--engines", "single", "--devices", 1, "--repeats", 2, "--timed-steps", 24)
    done = program("compare", *flags, "--run-dir", folder, *SMALL, "--epochs", 3, timeout=280)
    assert done.code == 0, done.out + done.err
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["reference"] == "single"
    for entry in comparison["engines"]:
        for name in ("images_per_s", "seconds_to_first_step", "peak_memory_bytes"):
            spread = entry["cost"][name]
            assert 0 < spread["lowest"] <= spread["median"] <= spread["highest"]


REJECTED = {
    "unknown engine": (["--engines", "raw_dpp"], ["raw_dpp", "did you mean raw_ddp?"]),
    "twice": (["--engines", "single,single"], ["single", "twice"]),
    "no repeats": (["--repeats", "some"], ["--repeats"]),
    "too few steps": (["--timed-steps", "5"], ["--timed-steps", "21"]),
    "a resume": (["--resume", "somewhere"], ["compare", "--resume"]),
    "a graph": (["--run.cuda_graph", "true"], ["run.cuda_graph", "not supported by every engine"]),
    "a wrong setting": (["--lr", "-1"], ["model.lr"]),
    "a batch that does not fit": (["--devices", "3", "--batch-size", "128"], ["128", "3 ranks"]),
    "callbacks": (["--trainer.callbacks", "LearningRateMonitor"], ["trainer.callbacks", "Lightning"]),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_comparison_is_rejected(program: Program, case: str) -> None:
    words, parts = REJECTED[case]
    assert_rejected(program("compare", *words), *parts)
    assert not (program.folder / "runs").exists()


def test_an_engine_that_fails_is_told_and_the_exit_code_is_1(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(fabric, "make_schedule", broken)
    flags = ("--engines", "raw_ddp,fabric", "--devices", 1, "--max-steps", 2)
    comparison = compared(program, *flags, code=1)
    assert comparison["engines"][1]["status"] == "failed"
    assert "planted" in comparison["engines"][1]["reason"]


def test_variants_are_chosen_by_name() -> None:
    names = [variant.name for variant in choose_variants("all")]
    assert names[:4] == ["lightning", "raw_ddp", "raw_ddp:torchrun", "raw_ddp:spawn"]
    assert [variant.name for variant in choose_variants("raw_ddp:spawn,single")] == ["raw_ddp:spawn", "single"]
    with pytest.raises(InputError, match="raw_ddp:spwan"):
        choose_variants("raw_ddp:spwan")


def test_lines_of_code_leaves_out_comments_docstrings_and_blanks(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        '"""Doc\n\nmore."""\n\n# comment\nx = 1  # said\n\n\ndef f():\n    """Doc."""\n    return (\n        1\n    )\n'
    )
    assert lines_of_code(path) == 5
    engines = Path(lit_mnist.__file__).parent / "engines"
    assert lines_of_code(engines / "single.py") < lines_of_code(engines / "raw_ddp.py")
