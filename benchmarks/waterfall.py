"""The waterfall of one training step: what each part of it takes, in raw DDP and in Lightning.

The parts are timed by `--run.trace times`, where both engines call the same functions. The loop around them is timed by
itself: the same engine, with the same loop, callbacks and calls, trains a network of one layer on one image per rank,
and what is spent there outside of all parts is the loop's own. The step that the parts are compared with is that of
the steps of a traced run that no probe is in: they take turns with the others every few steps, since on a busy machine
two runs differ by more than these parts. Runs without any trace are measured, too.

    python -m benchmarks.waterfall raw_ddp fit --devices 2 --run.trace times   a training of an almost empty network
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.programs import run_python, train
from benchmarks.rounds import Measurement, Numbers, Rows, Topic
from lit_mnist.models import build
from lit_mnist.profiling.timer import PARTS
from lit_mnist.run.metrics_log import read_metrics

ENGINES = ("raw_ddp", "lightning")
FRAMEWORK = "framework's loop"
_TRAIN_SIZE = 60_000
_WINDOW = 50
_UNTRACED, _TRACED, _EMPTY = "{}", "{}, traced", "{}, next to no network"


@dataclass(frozen=True)
class WaterfallOptions:
    """What to measure.

    Attributes:
        ranks: Number of ranks.
        batch_size: Samples of a step over all ranks.
        steps: Optimizer steps of each run; the first are left out as warm-up.
    """

    ranks: int = 2
    batch_size: int = 64
    steps: int = 220


def waterfall(options: WaterfallOptions) -> Topic:
    """Returns the topic of one step's parts, for raw DDP and Lightning."""
    measurements = []
    for engine in ENGINES:
        for name, take in ((_UNTRACED, _untraced), (_TRACED, _traced), (_EMPTY, _empty)):
            measurements.append(Measurement(name.format(engine), partial(take, options, engine), "step_ms"))
    return Topic(
        name="waterfall",
        title="One step, part by part",
        measurements=measurements,
        analyse=analyse,
        notes=(
            f"{options.ranks} ranks, {options.batch_size} samples per step; rank 0's times, means over the steps after "
            "the warm-up and over the rounds.",
            "Waiting for another rank counts where it happens: in the collectives of batch norm, of the gradient, or "
            "of the metrics for the screen.",
            f"The {FRAMEWORK} is the time outside of all parts in a training of one layer on one image per rank.",
        ),
    )


def analyse(rows: Rows) -> dict[str, Any]:
    """Returns each engine's parts, in milliseconds per step, and the rest of the step without probes."""
    return {"waterfall": {engine: _of_engine(rows, engine) for engine in ENGINES}}


def _of_engine(rows: Rows, engine: str) -> dict[str, Any]:
    def mean(of: str, key: str) -> float | None:
        # Not the median, since the parts' medians do not add up.
        values = [numbers[key] for numbers in rows[of.format(engine)] if key in numbers]
        return statistics.fmean(values) if values else None

    parts: list[dict[str, Any]] = [{"name": part, "ms": mean(_TRACED, part)} for part in PARTS]
    parts.append({"name": FRAMEWORK, "ms": mean(_EMPTY, "outside_ms")})
    plain = mean(_TRACED, "plain_step_ms")
    known = sum(part["ms"] for part in parts if part["ms"] is not None)
    return {
        "parts": parts,
        "hidden_all_reduce_ms": mean(_TRACED, "hidden_all_reduce_ms"),
        "plain_ms": plain,
        "untraced_ms": mean(_UNTRACED, "step_ms"),
        "sum_ms": known,
        "remainder_ms": None if plain is None else plain - known,
        "covered": known / plain if plain else None,
    }


def _flags(options: WaterfallOptions, batch_size: int) -> list[str]:
    steps_per_epoch = max(1, _TRAIN_SIZE // batch_size)
    return [
        "fit",
        *(f"--devices={options.ranks}", f"--batch-size={batch_size}", f"--max-steps={options.steps}"),
        *(f"--epochs={math.ceil(options.steps / steps_per_epoch)}", "--data.val_size=0"),
    ]


def _untraced(options: WaterfallOptions, engine: str, folder: Path) -> Numbers:
    result = train(folder, *_flags(options, options.batch_size), engine=engine)
    # The median leaves out what is done every so many steps, and the parts do not.
    speeds = [
        row["images_per_s"]
        for row in read_metrics(folder / "run")
        if row["step"] > _WINDOW and row["step"] % _WINDOW == 0 and "images_per_s" in row
    ]
    samples = result["config"]["trainer"]["accumulate_grad_batches"] * options.batch_size
    mean = statistics.fmean(1000 * samples / speed for speed in speeds)
    return {"step_ms": mean, "median_step_ms": 1000 * samples / result["train"]["images_per_s"]}


def _traced(options: WaterfallOptions, engine: str, folder: Path) -> Numbers:
    train(folder, *_flags(options, options.batch_size), "--run.trace=times", engine=engine)
    return _times(folder)


def _empty(options: WaterfallOptions, engine: str, folder: Path) -> Numbers:
    words = [*_flags(options, options.ranks), "--run.trace=times", f"--run-dir={folder / 'run'}"]
    run_python("-m", "benchmarks.waterfall", engine, *words, folder=folder)
    return _times(folder)


def _times(folder: Path) -> Numbers:
    found = json.loads((folder / "run" / "trace" / "times-rank0.json").read_text())
    parts = found.pop("parts_ms")
    return {name: float(value) for name, value in {**found, **parts}.items() if value is not None}


class NearlyNothing(nn.Module):
    """One linear layer over the first row of an image: a network that takes no time.

    Args:
        num_classes: Number of classes.
        views: For the ConvNet's signature; unused.
    """

    def __init__(self, num_classes: int, views: int) -> None:
        super().__init__()
        self.fc = nn.Linear(28, num_classes)

    def forward(self, images: torch.Tensor, rng: object = None) -> torch.Tensor:
        """Returns logits, [batch, num_classes], of images [batch, 1, 28, 28]."""
        return self.fc(images[:, 0, 0])


def train_nearly_nothing(words: Sequence[str], main: Callable[..., int]) -> int:
    """Runs a command line with a network that takes no time in the ConvNet's place; returns its exit code.

    Args:
        words: The engine's name and the command line.
        main: The command line's function.
    """
    build.ConvNet = NearlyNothing  # type: ignore[assignment, misc]
    return main(list(words[1:]), engine=words[0])


if __name__ == "__main__":
    from lit_mnist.cli.main import main as command_line

    sys.exit(train_nearly_nothing(sys.argv[1:], command_line))
