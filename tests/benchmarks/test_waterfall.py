"""The waterfall of a step: each part timed once, none twice, nothing changed by it, and a page that shows it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_page import bench_page
from conftest import Program, result_of, run_forked
from html_page import DASH

from benchmarks.waterfall import ENGINES, FRAMEWORK, WaterfallOptions, analyse, train_nearly_nothing, waterfall
from lit_mnist.cli.main import main
from lit_mnist.data.loader import Batch, TrainBatches
from lit_mnist.profiling.stopwatch import STEPS_WATCHED
from lit_mnist.profiling.timer import (
    ALL_REDUCE,
    BACKWARD,
    BATCH_NORM,
    DATA,
    FORWARD,
    METRICS,
    OPTIMIZER,
    OUTSIDE,
    PARTS,
    Timer,
)
from lit_mnist.profiling.timing import WARM_UP_STEPS
from lit_mnist.training.checkpoint_manager import CheckpointManager

STEPS = WARM_UP_STEPS + 15
FLAGS = ("fit", "--devices", 2, "--batch-size", 8, "--max-steps", STEPS, "--precision", "32-true", "--lr", 0.05)
DATA_FLAGS = ("--data.train_size", 8 * (STEPS - 5), "--data.val_size", 16, "--data.test_size", 16, "--epochs", 2)
CPU = ("--trainer.accelerator", "cpu")


def times_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads((folder / "trace" / f"times-rank{rank}.json").read_text()))


WORDS = (*FLAGS, *DATA_FLAGS, *CPU)


@pytest.fixture(scope="module")
def plain(shared_program: Program) -> Path:
    """A training without a trace, of which any engine's is the same, over an epoch's end with its evaluation."""
    return shared_program.train(*WORDS, engine="raw_ddp", timeout=60)


@pytest.fixture(scope="module", params=ENGINES)
def traced(request: pytest.FixtureRequest, shared_program: Program) -> Path:
    return shared_program.train(*WORDS, "--run.trace", "times", engine=request.param, timeout=60)


def test_all_parts_are_timed_and_make_up_the_step(traced: Path) -> None:
    for rank in (0, 1):
        found = times_of(traced, rank)
        parts = found["parts_ms"]
        assert tuple(parts) == PARTS
        assert all(spent >= 0 for spent in parts.values())
        for part in (DATA, FORWARD, BATCH_NORM, BACKWARD, ALL_REDUCE, METRICS, OPTIMIZER):
            assert parts[part] > 0, part
        assert found["steps"] >= STEPS_WATCHED - 3
        known = sum(parts.values()) + found["outside_ms"] + found["probe_ms"]
        assert known == pytest.approx(found["step_ms"], rel=0.03)
        assert found["hidden_all_reduce_ms"] == 0  # a single bucket


def test_the_stopwatch_and_the_clock_tell_the_same_step(traced: Path) -> None:
    clocked = 8 * 1000 / result_of(traced)["train"]["images_per_s"]
    assert times_of(traced)["median_step_ms"] == pytest.approx(clocked, rel=0.05)


def test_the_trace_changes_no_bit(plain: Path, traced: Path) -> None:
    expected, found = result_of(plain), result_of(traced)
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["validation"] == expected["validation"]
    assert not (plain / "trace").exists()


def test_a_closed_stopwatch_leaves_everything_as_it_was(tmp_path: Path) -> None:
    def work() -> int:
        places = (
            (torch.Tensor, "backward"),
            (torch.optim.Optimizer, "zero_grad"),
            (torch.amp.GradScaler, "step"),
            (Batch, "to"),
            (TrainBatches, "__iter__"),
            (CheckpointManager, "on_step_end"),
            (F, "cross_entropy"),
            (dist, "all_reduce"),
            (dist.Work, "wait"),
        )
        before = [vars(place)[name] for place, name in places]
        words = ("fit", "--batch-size", 8, "--max-steps", 2, "--data.val_size", 0, *CPU, "--run.trace", "times")
        code = main([*map(str, words), f"--run-dir={tmp_path / 'run'}"], engine="single")
        same = [vars(place)[name] is old for (place, name), old in zip(places, before, strict=True)]
        return code or 10 * (not all(same))

    assert run_forked(work, tmp_path, timeout=60).code == 0
    # Too short to tell a step's time.
    assert times_of(tmp_path / "run")["step_ms"] is None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_of_nearly_nothing_tells_the_loop(tmp_path: Path, engine: str) -> None:
    words = (*FLAGS, *CPU, "--data.val_size", 0, "--run.trace", "times", "--run-dir", tmp_path / "run")
    done = run_forked(lambda: train_nearly_nothing([engine, *map(str, words)], main), tmp_path, timeout=60)
    assert done.code == 0, done.out + done.err
    found = times_of(tmp_path / "run")
    assert found["outside_ms"] > 0
    assert found["parts_ms"][BATCH_NORM] == 0


def test_a_timer_accounts_each_moment_once_and_to_the_innermost_part() -> None:
    timer = Timer()
    timer.enter(BACKWARD)
    timer.enter(BATCH_NORM)
    other = threading.Thread(target=lambda: (timer.enter(DATA), timer.leave()))
    other.start()
    other.join()
    assert timer.running == BATCH_NORM
    timer.leave()
    assert timer.running == BACKWARD
    # A moment before the part began to run is taken for its beginning.
    before = timer.spent[BACKWARD]
    timer.switch(ALL_REDUCE, at=0.0)
    assert timer.spent[BACKWARD] == before
    timer.leave()
    assert timer.running == OUTSIDE
    assert timer.spent[BATCH_NORM] > 0
    assert timer.spent[DATA] == 0


def rows_of(step: float) -> dict[str, list[dict[str, float]]]:
    rows: dict[str, list[dict[str, float]]] = {}
    for measurement in waterfall(WaterfallOptions()).measurements:
        parts = dict.fromkeys(PARTS, 2.0) | {"outside_ms": 0.5, "hidden_all_reduce_ms": 0.25, "step_ms": 30.0}
        rows[measurement.name] = [{"plain_step_ms": step * share, **parts} for share in (0.5, 0.9, 1.6)]
    return rows


def test_the_remainder_is_what_the_parts_leave_of_the_step_without_a_trace() -> None:
    found = analyse(rows_of(25.0))["waterfall"]
    assert tuple(found) == ENGINES
    for engine in found.values():
        assert [part["name"] for part in engine["parts"]] == [*PARTS, FRAMEWORK]
        assert engine["sum_ms"] == pytest.approx(2 * len(PARTS) + 0.5)
        assert engine["remainder_ms"] == pytest.approx(25 - engine["sum_ms"])
        assert engine["covered"] == pytest.approx(engine["sum_ms"] / 25)
        assert engine["hidden_all_reduce_ms"] == 0.25


def test_the_page_shows_both_engines_side_by_side(tmp_path: Path) -> None:
    page = bench_page(tmp_path, analyse(rows_of(25.0)))
    assert [title["text"] for title in page.find("h3")][:2] == list(ENGINES)
    assert len(page.find("rect")) == 2 * (len(PARTS) + 3)
    head = [cell["text"] for cell in page.find("th") if cell["attrs"].get("scope") == "col"]
    assert head[:4] == ["ms per step", *ENGINES, "lightning beyond raw_ddp"]
    assert "nothing is synchronized" in page.text
    for rect in page.find("rect"):
        left, width = (float(rect["attrs"][name].rstrip("%")) for name in ("x", "width"))
        assert 0 <= left <= left + width <= 100.2


def test_the_page_shows_what_was_not_measured_and_negative_remainders(tmp_path: Path) -> None:
    rows = rows_of(10.0)
    for name, taken in rows.items():
        rows[name] = [{key: value for key, value in each.items() if key != DATA} for each in taken]
    page = bench_page(tmp_path, analyse(rows))
    assert DASH in page.text
    assert "\u2212" in page.text
