"""Scaling: the same work per rank on 1, 2, 4 and 8 ranks, and the bytes that they send.

Each rank has a batch of its own (weak scaling) and as many threads on every number of ranks. The cost of communication
follows from as many processes that exchange nothing, and from processes that only wait for each other, since on one
machine the ranks share its memory, its caches and, if there are more ranks than cores, its cores.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.programs import printed_numbers, train
from benchmarks.rounds import Measurement, Numbers, Ratio, Rows, Topic
from benchmarks.workload import Collective, batch_norm, ddp_gradient, server_gradient
from lit_mnist.comparison.equality import Run
from lit_mnist.distributed.rank import count_cores
from lit_mnist.experiment import Experiment
from lit_mnist.models.build import build_net

INDEPENDENT, LOCK_STEP, DDP_ALONE = "independent", "lock-step", "DDP alone"
RAW_DDP, SERVER = "raw_ddp", "parameter_server"
VARIANTS = (INDEPENDENT, LOCK_STEP, DDP_ALONE, RAW_DDP, SERVER)
_LOCKSTEP_FLAGS = {INDEPENDENT: ["--independent"], LOCK_STEP: [], DDP_ALONE: ["--ddp"]}
_TRAFFIC_STEPS = 16
# Bytes that gloo adds to a message: each side announces it, and it has a header, 48 bytes each.
_FRAMING = 144
NOTES = (
    "Each rank has a batch of its own, so that a step is as much work on any number of ranks.",
    "Efficiency is images per second divided by those of as many processes that exchange nothing, or that only wait "
    "for each other.",
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
    return Topic("scaling", "Scaling over ranks", measurements, ratios, partial(_analyse, options), NOTES)


def name_of(variant: str, ranks: int) -> str:
    """Returns the name of a variant's measurement on a number of ranks."""
    return f"{variant}, {ranks} rank{'s' * (ranks != 1)}"


def _take(options: ScalingOptions, variant: str, ranks: int, folder: Path) -> Numbers:
    batch = ranks * options.batch_per_rank
    if variant in _LOCKSTEP_FLAGS:
        words = ["--ranks", ranks, "--batch-size", batch, "--steps", options.steps, "--threads", options.threads]
        words += ["--precision", options.precision, *_LOCKSTEP_FLAGS[variant]]
        return printed_numbers("-m", "benchmarks.lockstep", *words, folder=folder)
    result = train(folder, *_engine_flags(options, ranks, options.steps), engine=variant)
    speed = float(result["train"]["images_per_s"])
    return {"images_per_s": speed, "step_ms": 1000 * batch / speed}


def _engine_flags(options: ScalingOptions, ranks: int, steps: int) -> list[object]:
    return [
        *("fit", "--devices", ranks, "--batch-size", ranks * options.batch_per_rank, "--max-steps", steps),
        *("--run.threads", options.threads, "--precision", options.precision, "--trainer.accelerator", "cpu"),
        *("--epochs", steps, "--data.val_size", 0),
    ]


def _analyse(options: ScalingOptions, rows: Rows) -> dict[str, Any]:
    engines = [(name, ranks) for name, ranks in options.pairs() if name in {RAW_DDP, SERVER} and ranks > 1]
    found = {
        "cores": count_cores(),
        "threads": options.threads,
        "batch_per_rank": options.batch_per_rank,
        "points": [
            _point(rows, variant, ranks, count_cores() // options.threads) for variant, ranks in options.pairs()
        ],
        "traffic": [_count(options, name, ranks) for name, ranks in engines],
    }
    return {"scaling": found}


@cache
def _count(options: ScalingOptions, engine: str, ranks: int) -> dict[str, Any]:
    """Trains a few steps and returns what they sent; only once, since all rounds send the same."""
    with tempfile.TemporaryDirectory() as folder:
        flags = _engine_flags(options, ranks, _TRAFFIC_STEPS)
        train(Path(folder), *flags, "--run.trace", "traffic", engine=engine)
        net = build_net(Experiment().model, num_classes=10, seed=0)
        return traffic_of(Run.read(Path(folder) / "run"), engine, collectives_of(net)[engine])


def _point(rows: Rows, variant: str, ranks: int, most_ranks: int) -> dict[str, Any]:
    """Returns a measurement's medians, and its efficiency against each base: the median of the rounds' ratios."""
    numbers, efficiency = rows[name_of(variant, ranks)], {}
    for base in (INDEPENDENT, LOCK_STEP):
        pairs = zip(numbers, rows[name_of(base, ranks)], strict=True)
        efficiency[base] = statistics.median(one["images_per_s"] / other["images_per_s"] for one, other in pairs)
    return {
        "variant": variant,
        "ranks": ranks,
        "beyond_cores": ranks > most_ranks,
        "images_per_s": statistics.median(each["images_per_s"] for each in numbers),
        "step_ms": statistics.median(each["step_ms"] for each in numbers),
        "efficiency": efficiency,
    }


def collectives_of(net: nn.Module) -> dict[str, list[Collective]]:
    """Returns the communication of a step of the engines, for a network whose gradients are float32."""
    norm = batch_norm(net)
    return {RAW_DDP: [*norm, *ddp_gradient(net)], SERVER: [*norm, *server_gradient(net)]}


def traffic_of(run: Run, engine: str, collectives: Sequence[Collective]) -> dict[str, Any]:
    """Returns the bytes that the busiest rank sent in a step, as counted in a run with a trace and by the formulas."""
    ranks = len(run.traces)
    busiest = max((found["traffic"] for found in run.traces), key=lambda found: found["payload_bytes"])
    # The profiler counts the mean once for each rank that a server sends it to.
    others = ranks - 1
    payload = sum(each.bytes * (others if each.kind == "server" else 1) for each in collectives)
    # gloo divides each part that travels a ring in two; an exchange does not use gloo.
    per_rank = {"all_reduce": 4, "server": 1, "exchange": 0}
    messages = others * sum(per_rank[each.kind] for each in collectives)
    return {
        "engine": engine,
        "ranks": ranks,
        "payload_bytes": busiest["payload_bytes"],
        "payload_formula": payload,
        "bytes_sent": busiest["bytes_sent"],
        "data_formula": sum(each.sent(ranks) for each in collectives),
        "framing_formula": _FRAMING * messages,
    }
