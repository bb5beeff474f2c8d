"""The calls of one training step in Lightning's loop, under a stock Trainer and under LitTrainer.

    python -m benchmarks.calls
    python -m benchmarks.calls --steps 400

A module of one linear layer trains on one rank with five callbacks that have no hooks of their own, so that a step is
little more than the loop. A first run of each Trainer measures the median step without the profiler. A second one
counts the calls with cProfile, which makes a step several times longer: its times are scaled to the step that was
measured without it. A row is a source file. Its time is that of its own functions, with what they call in C, so that
the rows add up to the step.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist import LitTrainer
from lit_mnist.profiling.timing import WARM_UP_STEPS

# A file below this share of a step is one of the others.
_LEAST = 0.01
_TOTAL, _OTHERS = "step", "other files"
_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}
# Each with what makes its Trainer; a stock Trainer first.
TRAINERS: dict[str, Callable[..., Trainer]] = {
    "stock": lambda **options: Trainer(**_QUIET, **options),
    "LitTrainer": lambda **options: LitTrainer(precision="32-true", **_QUIET, **options),
}
# Calls and microseconds of a step, by file.
Calls = dict[str, tuple[float, float]]


class Clock(Callback):
    """Takes the time of each step, and profiles the steps after the warm-up.

    Args:
        profile: The profiler, or None.
    """

    def __init__(self, profile: cProfile.Profile | None = None) -> None:
        self.profile = profile
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Adds a time; the profiler starts after the warm-up."""
        self.times.append(time.perf_counter())
        if self.profile and len(self.times) == WARM_UP_STEPS:
            self.profile.enable()

    def on_train_epoch_end(self, *_: Any) -> None:
        """Ends the profile."""
        if self.profile:
            self.profile.disable()


class Unused(Callback):
    """Has no hook of its own."""


class Layer(LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Returns a loss."""
        return cast(torch.Tensor, self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step_us(make: Callable[..., Trainer], steps: int) -> float:
    """Returns the microseconds of a median step without the profiler."""
    clock = _train(make, steps, Clock())
    taken = zip(clock.times[WARM_UP_STEPS:], clock.times[WARM_UP_STEPS + 1 :], strict=False)
    return 1e6 * statistics.median(after - before for before, after in taken)


def calls_of(make: Callable[..., Trainer], steps: int, us: float) -> Calls:
    """Returns the calls of a step by file, those of C functions by the file of their callers.

    Args:
        make: Makes the Trainer.
        steps: Number of profiled steps.
        us: Microseconds of a step, to which the times are scaled.
    """
    profile = cProfile.Profile()
    _train(make, steps, Clock(profile))
    stats: Any = pstats.Stats(profile)
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (file, *_), (_, calls, own, _, callers) in stats.stats.items():
        # A function in C has no file.
        parts = [(file, calls, own)]
        if file == "~":
            parts = [(caller[0], calls, own) for caller, (_, calls, own, _) in callers.items()]
        for name, calls_here, seconds in parts:
            found[_short(name)][0] += calls_here / steps
            found[_short(name)][1] += seconds * us / stats.total_tt
    return {name: (calls, took) for name, (calls, took) in found.items()}


def _short(file: str) -> str:
    for package in ("lightning", "torch", "lit_mnist", "torchmetrics"):
        if (start := file.rfind(f"/{package}/")) >= 0:
            return file[start + 1 :]
    return Path(file).name


def _train(make: Callable[..., Trainer], steps: int, clock: Clock) -> Clock:
    torch.manual_seed(0)
    data = torch.rand(WARM_UP_STEPS + steps, 4)
    trainer = make(max_epochs=1, callbacks=[*(Unused() for _ in range(5)), clock])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Layer(), DataLoader[Any](TensorDataset(data)))
    return clock


def table(found: Mapping[str, Calls]) -> str:
    """Returns the calls of each Trainer side by side, by the time under the first, as text."""
    total = {name: sum(us for _, us in calls.values()) for name, calls in found.items()}
    names = {name for calls in found.values() for name in calls} - {_OTHERS}
    small = {
        name for name in names if all(calls.get(name, (0, 0))[1] < _LEAST * total[of] for of, calls in found.items())
    }
    rows: dict[str, list[tuple[float, float]]] = {}
    for name in names - small:
        rows[name] = [calls.get(name, (0.0, 0.0)) for calls in found.values()]
    rows = dict(sorted(rows.items(), key=lambda row: -row[1][0][1]))
    for name, of in ((_OTHERS, [*small, _OTHERS]), (_TOTAL, [*names, _OTHERS])):
        rows[name] = [_sum([calls.get(each, (0.0, 0.0)) for each in of]) for calls in found.values()]
    lines = [f"{'file':72}" + "".join(f"{f'{name}: calls':>18}{'µs':>9}" for name in found)]
    lines += [f"{name:72}" + "".join(f"{calls:18.1f}{us:9.1f}" for calls, us in row) for name, row in rows.items()]
    return "\n".join(lines)


def _sum(parts: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(calls for calls, _ in parts), sum(us for _, us in parts)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the table and returns the exit code.

    Args:
        argv: The arguments; by default the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run after the warm-up")
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(f"--steps must be at least 2, but is {options.steps}")
    torch.set_num_threads(1)
    found = {name: calls_of(make, options.steps, step_us(make, options.steps)) for name, make in TRAINERS.items()}
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
