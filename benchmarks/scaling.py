"""Scaling: images per second of the same work per rank on 1, 2, 4 and 8 ranks.

Each rank has a batch of its own (weak scaling) and as many threads on every number of ranks. The cost of communication
follows from as many processes that exchange nothing, and from processes that only wait for each other, since on one
machine the ranks share its memory, its caches and, if there are more ranks than cores, its cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.programs import printed_numbers, train
from benchmarks.rounds import Measurement, Numbers, Ratio, Topic
from lit_mnist.distributed.rank import count_cores

INDEPENDENT, LOCK_STEP, DDP_ALONE = "independent", "lock-step", "DDP alone"
RAW_DDP, SERVER = "raw_ddp", "parameter_server"
VARIANTS = (INDEPENDENT, LOCK_STEP, DDP_ALONE, RAW_DDP, SERVER)
_LOCKSTEP_FLAGS = {INDEPENDENT: ["--independent"], LOCK_STEP: [], DDP_ALONE: ["--ddp"]}
NOTES = (
    "Each rank has a batch of its own, so that a step is as much work on any number of ranks.",
    "The ratios are efficiencies: compared with as many processes that exchange nothing, or that only wait for each "
    "other.",
    "raw_ddp and parameter_server synchronize batch norm if there are several ranks; the others never do.",
)


@dataclass(frozen=True)
class ScalingOptions:
    """What is measured.

    Attributes:
        ranks: Numbers of ranks.
        batch_per_rank: Samples of a step on each rank.
        steps: Optimizer steps of a run, warm-up included.
        threads: Threads of each rank, on any number of ranks.
        precision: `auto`, `32-true` or `bf16-mixed`.
    """

    ranks: tuple[int, ...] = (1, 2, 4, 8)
    batch_per_rank: int = 64
    steps: int = 100
    threads: int = 1
    precision: str = "32-true"

    def pairs(self) -> Iterator[tuple[str, int]]:
        """Returns what is measured: variants on numbers of ranks; a parameter server needs a second rank."""
        for ranks in self.ranks:
            yield from ((variant, ranks) for variant in VARIANTS if variant != SERVER or ranks > 1)


def scaling(options: ScalingOptions) -> Topic:
    """Returns the topic: images per second of each variant on each number of ranks, and what follows from them."""
    measurements = [Measurement(name_of(*pair), partial(_take, options, *pair)) for pair in options.pairs()]
    ratios = [
        Ratio(name_of(of, ranks), name_of(to, ranks))
        for of, ranks in options.pairs()
        for to in (INDEPENDENT, LOCK_STEP)
        if of in {DDP_ALONE, RAW_DDP}
    ]
    ratios += [Ratio(name_of(SERVER, ranks), name_of(RAW_DDP, ranks)) for ranks in options.ranks if ranks > 1]
    cores = f"The ranks share {count_cores()} cores; each has as many threads on any number of ranks."
    return Topic("scaling", "Scaling over ranks", measurements, ratios, notes=(*NOTES, cores))


def name_of(variant: str, ranks: int) -> str:
    """Returns the name of a variant's measurement on a number of ranks."""
    return f"{variant}, {ranks} rank{'s' * (ranks != 1)}"


def _take(options: ScalingOptions, variant: str, ranks: int, folder: Path) -> Numbers:
    batch = ranks * options.batch_per_rank
    if variant in _LOCKSTEP_FLAGS:
        words = ["--ranks", ranks, "--batch-size", batch, "--steps", options.steps, "--threads", options.threads]
        words += ["--precision", options.precision, *_LOCKSTEP_FLAGS[variant]]
        return printed_numbers("-m", "benchmarks.lockstep", *words, folder=folder)
    flags = [
        *("fit", "--devices", ranks, "--batch-size", batch, "--max-steps", options.steps, "--epochs", options.steps),
        *("--run.threads", options.threads, "--precision", options.precision, "--trainer.accelerator", "cpu"),
        *("--data.val_size", 0),
    ]
    speed = float(train(folder, *flags, engine=variant)["train"]["images_per_s"])
    return {"images_per_s": speed, "step_ms": 1000 * batch / speed}
