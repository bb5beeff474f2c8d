"""How far more ranks help: the same work per rank on 1, 2, 4 and 8 of them, what they send, and a model of the step.

Each rank has a batch of its own (weak scaling) and as many threads on every number of ranks. What communication costs
is told by as many processes that share nothing, and by processes that only keep in step, since on one machine the ranks
share its memory, its caches and, where they are more than its cores, these.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.model import Point, StepModel, errors, fit, held_out_errors
from benchmarks.programs import printed_figures, train
from benchmarks.rounds import Figures, Measurement, Ratio, Rows, Topic
from benchmarks.workload import Collective, Workload, batch_norm, ddp_gradient, server_gradient
from lit_mnist.comparison.equality import Run
from lit_mnist.distributed.rank import cores
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.models.build import build_net
from lit_mnist.run.timing import spread

INDEPENDENT, LOCK_STEP, DDP_ALONE = "independent", "lock-step", "DDP alone"
RAW_DDP, SERVER = "raw_ddp", "parameter_server"
VARIANTS = (INDEPENDENT, LOCK_STEP, DDP_ALONE, RAW_DDP, SERVER)
# Bytes per second in each direction, and seconds for a message of no length: usual figures, not measured here.
NETWORKS = {
    "1 Gb/s Ethernet": (125e6, 50e-6),
    "10 Gb/s Ethernet": (1.25e9, 20e-6),
    "100 Gb/s InfiniBand": (12.5e9, 2e-6),
}
PREDICTED_RANKS = tuple(2**power for power in range(11))
_LOCKSTEP_FLAGS = {INDEPENDENT: ["--independent"], LOCK_STEP: [], DDP_ALONE: ["--ddp"]}
_BARE, _ENGINE = "bare loop", "engine with synchronised batch norm"
_TRAFFIC_STEPS = 16
# Before a message of gloo's each side announces it, and it has a header: three times 48 bytes.
_FRAMING = 144
NOTES = (
    "Each rank has a batch of its own, so that a step is as much work on any number of ranks.",
    "Efficiency is images per second by those of as many processes that share nothing, or that only keep in step.",
    "raw_ddp and parameter_server synchronise batch norm where there are several ranks; the others never do.",
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


def _take(options: ScalingOptions, variant: str, ranks: int, folder: Path) -> Figures:
    batch = ranks * options.batch_per_rank
    if variant in _LOCKSTEP_FLAGS:
        words = ["--ranks", ranks, "--batch-size", batch, "--steps", options.steps, "--threads", options.threads]
        words += ["--precision", options.precision, *_LOCKSTEP_FLAGS[variant]]
        return printed_figures("-m", "benchmarks.lockstep", *words, folder=folder)
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
    loads = _loads(options)
    engines = [(name, ranks) for name, ranks in options.pairs() if name in {RAW_DDP, SERVER} and ranks > 1]
    found = {
        "cores": cores(),
        "threads": options.threads,
        "batch_per_rank": options.batch_per_rank,
        "points": [_point(rows, variant, ranks, cores() // options.threads) for variant, ranks in options.pairs()],
        "traffic": [_count(options, name, ranks) for name, ranks in engines],
        "model": model_of(options, loads, rows, cores()),
    }
    return {"scaling": found}


def _loads(options: ScalingOptions) -> dict[str, Workload]:
    return workloads(build_net(Experiment().model, num_classes=10, seed=0), options.batch_per_rank)


@cache
def _count(options: ScalingOptions, engine: str, ranks: int) -> dict[str, Any]:
    """Trains a few steps, and returns what they sent: in the first round alone, since no other sends anything else."""
    with tempfile.TemporaryDirectory() as folder:
        flags = _engine_flags(options, ranks, _TRAFFIC_STEPS)
        train(Path(folder), *flags, "--run.trace", "traffic", engine=engine)
        return traffic_of(Run.read(Path(folder) / "run"), _loads(options)[engine])


def _point(rows: Rows, variant: str, ranks: int, most_ranks: int) -> dict[str, Any]:
    """Returns a measurement's medians, and its efficiency against each base: the median of the rounds' ratios."""
    figures, efficiency = rows[name_of(variant, ranks)], {}
    for base in (INDEPENDENT, LOCK_STEP):
        pairs = zip(figures, rows[name_of(base, ranks)], strict=True)
        efficiency[base] = statistics.median(one["images_per_s"] / other["images_per_s"] for one, other in pairs)
    return {
        "variant": variant,
        "ranks": ranks,
        "beyond_cores": ranks > most_ranks,
        "images_per_s": statistics.median(each["images_per_s"] for each in figures),
        "step_ms": statistics.median(each["step_ms"] for each in figures),
        "efficiency": efficiency,
    }


def workloads(net: nn.Module, batch_per_rank: int) -> dict[str, Workload]:
    """Returns what each variant shares in a step, for a network whose gradients are float32."""
    norm = batch_norm(net)
    shared = {
        LOCK_STEP: [Collective("all_reduce", 4)],
        DDP_ALONE: ddp_gradient(net),
        RAW_DDP: [*norm, *ddp_gradient(net)],
        SERVER: [*norm, *server_gradient(net)],
    }
    loops = {RAW_DDP: _ENGINE, SERVER: _ENGINE}
    return {name: Workload(name, loops.get(name, _BARE), batch_per_rank, shared.get(name, ())) for name in VARIANTS}


def traffic_of(run: Run, load: Workload) -> dict[str, Any]:
    """Returns what the busiest rank of a run that counted its traffic sent in a step, counted and by the formulas."""
    ranks, shared = len(run.traces), load.collectives
    busiest = max((found["traffic"] for found in run.traces), key=lambda found: found["payload_bytes"])
    # The profiler sees the mean once for each rank that a server sends it to.
    others = ranks - 1
    payload = sum(each.bytes * (others if each.kind == "server" else 1) for each in shared)
    # gloo divides each part that travels a ring in two; an exchange is not gloo's.
    per_rank = {"all_reduce": 4, "server": 1, "exchange": 0}
    messages = others * sum(per_rank[each.kind] for each in shared)
    return {
        "engine": load.name,
        "ranks": ranks,
        "payload_bytes": busiest["payload_bytes"],
        "payload_formula": payload,
        "bytes_sent": busiest["bytes_sent"],
        "data_formula": sum(each.sent(ranks) for each in shared),
        "framing_formula": _FRAMING * messages,
    }


def model_of(options: ScalingOptions, loads: Mapping[str, Workload], rows: Rows, cores: int) -> dict[str, Any]:
    """Returns the model that fits the medians, how well it does, and what it predicts; or why there is none."""
    points = [
        Point(
            loads[variant], ranks, statistics.median(each["step_ms"] for each in rows[name_of(variant, ranks)]) / 1000
        )
        for variant, ranks in options.pairs()
        # On one rank the engines' batch norm is torch's own, which is other code.
        if ranks > 1 or variant not in {RAW_DDP, SERVER}
    ]
    machine = {"cores": cores, "threads": options.threads}
    try:
        model = fit(points, **machine)
    except InputError as error:
        return {"refused": str(error)}
    shares: dict[str, Sequence[float | None]] = {
        "error": errors(model, points),
        "without_point": held_out_errors(points, lambda point: (point.workload.name, point.ranks), **machine),
        "without_ranks": held_out_errors(points, lambda point: point.ranks, **machine),
    }
    return {
        "coefficients": asdict(model),
        "points": [
            {
                "variant": point.workload.name,
                "ranks": point.ranks,
                "measured_ms": 1000 * point.seconds,
                "predicted_ms": 1000 * model.step_seconds(point.workload, point.ranks),
                **{name: share[n] for name, share in shares.items()},
            }
            for n, point in enumerate(points)
        ],
        "errors": {name: _typical(share) for name, share in shares.items()},
        "predictions": [
            {
                "variant": variant,
                "network": network,
                "bandwidth_bytes_per_s": bandwidth,
                "latency_s": latency,
                "points": _curve(model, loads[variant], bandwidth, latency),
            }
            for variant in (RAW_DDP, DDP_ALONE, SERVER)
            for network, (bandwidth, latency) in NETWORKS.items()
        ],
    }


def _curve(model: StepModel, load: Workload, bandwidth: float, latency: float) -> list[dict[str, float]]:
    found = (model.predict(load, ranks, bandwidth, latency) for ranks in PREDICTED_RANKS)
    return [{"ranks": each.ranks, "step_ms": 1000 * each.seconds, "efficiency": each.efficiency} for each in found]


def _typical(shares: Sequence[float | None]) -> dict[str, float] | None:
    """Returns the median and the largest of the errors' sizes; None where there is none."""
    sizes = spread([None if share is None else abs(share) for share in shares])
    return sizes and {"median": sizes["median"], "largest": sizes["highest"]}
