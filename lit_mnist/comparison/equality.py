"""Compares two trainings step by step, and finds their first difference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_mnist.checkpoint.format import LAST, read_checkpoint
from lit_mnist.profiling import trace
from lit_mnist.training.state import net_weights

# The rounding error of another order of summation, relative to the loss of the first step.
_ROUNDING = {"64-true": 1e-12, "32-true": 1e-5, "bf16-mixed": 2e-2, "16-mixed": 5e-3}


@dataclass(frozen=True)
class Run:
    """A finished training with the traces of its ranks.

    Attributes:
        folder: The run folder.
        result: The content of `result.json`.
        traces: The trace of each rank.
    """

    folder: Path
    result: dict[str, Any]
    traces: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Reads a run folder."""
        result = json.loads((folder / "result.json").read_text())
        count = len(list((folder / trace.FOLDER).glob("rank-*.json")))
        traces = [json.loads((folder / trace.FOLDER / f"rank-{rank}.json").read_text()) for rank in range(count)]
        return cls(folder, result, traces)

    @property
    def losses(self) -> list[float]:
        """The loss of each step, as the mean over the ranks."""
        per_rank = [[step["loss"] for step in found["steps"]] for found in self.traces]
        return [sum(values) / len(values) for values in zip(*per_rank, strict=True)]

    @property
    def samples(self) -> list[str]:
        """A digest of each step's samples over all ranks."""
        per_rank = [[int(step["samples"], 16) for step in found["steps"]] for found in self.traces]
        return [f"{sum(values) % 2**64:016x}" for values in zip(*per_rank, strict=True)]

    @property
    def lrs(self) -> list[float]:
        """The learning rate of each step."""
        return [step["lr"] for step in self.traces[0]["steps"]]

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks ended with the same weights."""
        return all(found["steps"][-1]["weights"] == self.traces[0]["steps"][-1]["weights"] for found in self.traces)

    def final_weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the network's tensors after the last step."""
        checkpoint = read_checkpoint(self.folder / "checkpoints" / LAST)
        return {name: tensor.numpy() for name, tensor in net_weights(checkpoint).items()}

    def kept_weights(self, rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the tensors of a rank after `run.trace_step`."""
        with np.load(self.folder / trace.FOLDER / f"rank-{rank}-step-{step}.npz", allow_pickle=False) as file:
            return dict(file)


@dataclass(frozen=True)
class Difference:
    """The first difference between two trainings.

    Attributes:
        step: The optimizer step, from 1; 0 for the initial weights.
        what: `initial weights`, `samples`, `learning rate`, `loss`, `weights` or `number of steps`.
        rank: The rank that differs, or None if it applies to all ranks.
        tensor: The first tensor that differs, in the network's order.
        by: The absolute difference, or None if it is not a number.
    """

    step: int
    what: str
    rank: int | None = None
    tensor: str | None = None
    by: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the difference as plain values, with a description in `text`."""
        place = "before the first step" if self.step == 0 else f"step {self.step}"
        text = f"{place}: {self.what} {'differs' if self.what in {'loss', 'learning rate'} else 'differ'}"
        text += f", first in {self.tensor}" if self.tensor else ""
        text += f", by {self.by:.3g}" if self.by is not None else ""
        text += f" (rank {self.rank})" if self.rank is not None else ""
        return {**vars(self), "text": text}


def first_difference(one: Run, other: Run) -> Difference | None:
    """Returns the first difference between two trainings, or None if the traces of all ranks are bit-identical.

    On different numbers of ranks, it compares what rounding does not change: initial weights, samples, learning rates.
    """
    per_rank = len(one.traces) == len(other.traces)
    traces = [run.traces if per_rank else [_combine_ranks(run)] for run in (one, other)]
    pairs = list(enumerate(zip(*traces, strict=True)))
    for rank, (a, b) in pairs:
        if tensor := _first_tensor(a["initial"], b["initial"]):
            return Difference(0, "initial weights", rank if per_rank else None, tensor)
    steps = [len(run.lrs) for run in (one, other)]
    checked = ["samples", "lr", *(["loss", "weights"] if per_rank else [])]
    for step in range(min(steps)):
        for key in checked:
            for rank, (a, b) in pairs:
                mine, yours = a["steps"][step][key], b["steps"][step][key]
                if mine != yours:
                    tensor = _first_tensor(mine, yours) if key == "weights" else None
                    by = abs(mine - yours) if isinstance(mine, float) else None
                    what = "learning rate" if key == "lr" else key
                    return Difference(step + 1, what, rank if per_rank and key != "lr" else None, tensor, by)
    return Difference(min(steps) + 1, "number of steps") if steps[0] != steps[1] else None


def _combine_ranks(run: Run) -> dict[str, Any]:
    """Returns the part of the traces that does not depend on the number of ranks."""
    steps = [{"samples": samples, "lr": lr} for samples, lr in zip(run.samples, run.lrs, strict=True)]
    return {"initial": run.traces[0]["initial"], "steps": steps}


def _first_tensor(mine: dict[str, str], yours: dict[str, str]) -> str | None:
    return next((name for name in [*mine, *yours] if mine.get(name) != yours.get(name)), None)


def largest_difference(
    mine: dict[str, np.ndarray[Any, Any]], yours: dict[str, np.ndarray[Any, Any]], *, relative: bool = False
) -> float:
    """Returns the largest difference between two sets of tensors, absolute or relative to each tensor's maximum."""
    found = 0.0
    for name, value in mine.items():
        a, b = value.astype(np.float64), yours[name].astype(np.float64)
        scale = max(float(np.abs(a).max()), 1e-30) if relative else 1.0
        found = max(found, float(np.abs(a - b).max()) / scale)
    return found


def compare_runs(reference: Run, other: Run, *, expected: str) -> dict[str, Any]:
    """Compares a run with the reference, and checks that they agree as expected.

    Args:
        reference: The reference.
        other: The run.
        expected: `samples`: the same initial weights, samples and learning rates; `rounding`: also the same first loss
            except for rounding; `1e-05 relative`: as `samples`, with final weights within this limit; `bits`:
            bit-identical.
    """
    difference = first_difference(reference, other)
    same_ranks = len(reference.traces) == len(other.traces)
    weights = reference.final_weights(), other.final_weights()
    tests = [run.result["test"] for run in (reference, other)]
    per_rank = [
        [{key: step[key] for key in ("samples", "loss")} for trace_ in run.traces for step in trace_["steps"]]
        for run in (reference, other)
    ]
    checks = {
        "initial_weights": reference.traces[0]["initial"] == other.traces[0]["initial"],
        "samples": reference.samples == other.samples,
        "learning_rate": reference.lrs == other.lrs,
        "loss": per_rank[0] == per_rank[1] if same_ranks else reference.losses == other.losses,
        "weights": reference.traces[0]["steps"][-1]["weights"] == other.traces[0]["steps"][-1]["weights"],
        "test": (
            all(tests) and [test["confusion"] for test in tests] == [tests[0]["confusion"]] * 2 if any(tests) else None
        ),
    }
    # Without synchronized batch norm, the running statistics of the ranks differ, in every engine.
    agree = other.ranks_agree or not reference.ranks_agree
    same_work = agree and all(checks[key] for key in ("initial_weights", "samples", "learning_rate"))
    if expected == "bits":
        met = difference is None and other.ranks_agree == reference.ranks_agree and checks["test"] is not False
    elif expected == "samples":
        met = same_work
    elif expected == "rounding":
        first, own = reference.losses[0], other.losses[0]
        met = same_work and abs(first - own) <= _ROUNDING[other.result["precision"]] * abs(first)
    else:
        met = same_work and largest_difference(*weights, relative=True) <= 1e-5
    return {
        "expected": expected,
        "met": met,
        **checks,
        "largest_difference": largest_difference(*weights),
        "first_difference": difference.to_dict() if difference else None,
    }
