"""Growth with ranks over a network: a model from constants of two ranks, and runs that check it on more ranks.

    python -m benchmarks.growth --ranks 4 --gbit 1 --latency 0.1    milliseconds of a step of each variant, as JSON

Each rank is in its own network namespace, behind a link of a chosen bandwidth and latency (`benchmarks/network.py`). It
trains on 16 samples of its own with one thread, in float32, without synchronized batch norm. The variants exchange
gradients with DistributedDataParallel, in one bucket or four; compress them to bfloat16, or to matrices of rank one
(PowerSGD); or average the weights every eight steps (local SGD). The last three change what is computed. Here they are
timed only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import INTERFACE, Link, address, enter, network
from benchmarks.programs import printed_numbers
from benchmarks.rounds import Measurement, Numbers, Rows, Topic
from lit_mnist.distributed.ddp_arguments import DDP_OPTIONS
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank, count_cores, keep_memory
from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import LitMnistError
from lit_mnist.models.convnet import ConvNet

RANKS = (2, 4, 8)
LINKS = tuple(Link(gbit, latency) for gbit in (1, 10) for latency in (0.1, 1, 10))
ALONE, DDP, BUCKETS = "no communication", "DDP", "DDP, four buckets"
BFLOAT16, POWER_SGD, LOCAL_SGD = "DDP, bfloat16", "DDP, PowerSGD", "local SGD"
VARIANTS = (ALONE, DDP, BUCKETS, BFLOAT16, POWER_SGD, LOCAL_SGD)
_BUCKETS, _STEPS_BETWEEN_AVERAGES = 4, 8
_BATCH, _WARM_UP, _STEPS = 16, 3, 8
# Elements of the two all-reduces that give the constants.
_SMALL, _LARGE = 256, 2_000_000
_PORT, _SECONDS_TO_WAIT = 29_500, 120


def _perceptron() -> nn.Module:
    """Two hidden layers of 1,024 units."""
    wide = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *wide, nn.Linear(1024, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"ConvNet": ConvNet, "perceptron": _perceptron}


def growth() -> Topic:
    """How does a step grow with ranks and with the network between them, and what pays from which network on?"""
    return Topic(
        name="growth",
        title="Growth with ranks over a network",
        measurements=[
            Measurement(name_of(ranks, link), partial(_take, ranks, link), "step_ms", _lacks_network)
            for link in LINKS
            for ranks in RANKS
        ],
        analyse=analyse,
        notes=(
            f"Each rank is in its own network namespace on {count_cores()} cores. The main number is the step of the "
            "ConvNet with DDP.",
            "The model knows the step without communication on as many ranks, the bytes, and the time of two "
            "all-reduces on two ranks.",
        ),
    )


def name_of(ranks: int, link: Link) -> str:
    """Returns the name of a measurement."""
    return f"{ranks} ranks, {link.name}"


def all_reduce_ms(elements: float, ranks: int, hop_ms: float, ms_per_element: float) -> float:
    """Returns the milliseconds of a ring all-reduce (Patarasuk and Yuan, 2009).

    Args:
        elements: Number of float32 elements.
        ranks: Number of ranks.
        hop_ms: Milliseconds of a message of next to nothing from one rank to the next.
        ms_per_element: Milliseconds of one more element in a message.
    """
    return 2 * (ranks - 1) * (hop_ms + ms_per_element * elements / ranks)


def constants(numbers: Numbers) -> tuple[float, float]:
    """Returns the milliseconds of a hop and of an element, from a small and a large all-reduce of two ranks."""
    per_element = (numbers["large_ms"] - numbers["small_ms"]) / (_LARGE - _SMALL)
    return numbers["small_ms"] / 2, max(per_element, 0.0)


def predict(variant: str, alone_ms: float, elements: int, reduce: Callable[[float], float]) -> float | None:
    """Returns the milliseconds of a step, or None where the model says nothing.

    Args:
        variant: One of `VARIANTS`.
        alone_ms: Milliseconds of a step without communication, on as many ranks.
        elements: Number of parameters.
        reduce: Returns the milliseconds of an all-reduce of a number of float32 elements.
    """
    exchanged = {
        ALONE: 0.0,
        # The buckets overlap with the backward pass, which the model leaves out.
        DDP: reduce(elements),
        BFLOAT16: reduce(elements / 2),
        LOCAL_SGD: reduce(elements) / _STEPS_BETWEEN_AVERAGES,
    }
    return alone_ms + exchanged[variant] if variant in exchanged else None


def analyse(rows: Rows) -> Mapping[str, Any]:
    """Returns what was measured and what the model says, for each network between the ranks."""
    found = []
    for link in LINKS:
        if not rows[name_of(2, link)]:
            continue
        hop_ms, ms_per_element = constants(_medians(rows[name_of(2, link)]))
        steps = [
            row
            for ranks in RANKS
            for row in _steps(ranks, _medians(rows[name_of(ranks, link)]), hop_ms, ms_per_element)
        ]
        found.append({**vars(link), "hop_ms": hop_ms, "ms_per_element": ms_per_element, "steps": steps})
    return {"growth": found}


def _steps(ranks: int, numbers: Numbers, hop_ms: float, ms_per_element: float) -> Iterator[dict[str, Any]]:
    for net, make in NETWORKS.items():
        elements = sum(parameter.numel() for parameter in make().parameters())
        reduce = partial(all_reduce_ms, ranks=ranks, hop_ms=hop_ms, ms_per_element=ms_per_element)
        for variant in VARIANTS:
            predicted = predict(variant, numbers[f"{net}/{ALONE}"], elements, reduce)
            measured = numbers[f"{net}/{variant}"]
            yield {"net": net, "ranks": ranks, "variant": variant, "measured_ms": measured, "predicted_ms": predicted}


def _medians(taken: Any) -> dict[str, float]:
    return {name: statistics.median(numbers[name] for numbers in taken) for name in (taken[0] if taken else ())}


def _take(ranks: int, link: Link, folder: Path) -> Numbers:
    words = ("--ranks", ranks, "--gbit", link.gbit_per_s, "--latency", link.latency_ms)
    numbers = printed_numbers("-m", "benchmarks.growth", *words, folder=folder)
    return {"step_ms": numbers[f"ConvNet/{DDP}"], **numbers}


def _lacks_network(rows: Rows) -> str | None:
    try:
        with network(1, LINKS[0]):
            return None
    except LitMnistError as error:
        return str(error)


class _Training:
    """A training of one variant."""

    def __init__(self, make: Callable[[], nn.Module], variant: str) -> None:
        torch.manual_seed(0)
        self.net = make().to(memory_format=torch.channels_last)
        self.variant = variant
        self.model = self._wrapped() if variant not in (ALONE, LOCAL_SGD) else self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.images, self.targets = torch.rand(_BATCH, 1, 28, 28), torch.randint(10, (_BATCH,))
        self.steps = 0

    def _wrapped(self) -> nn.Module:
        megabytes = 4 * sum(parameter.numel() for parameter in self.net.parameters()) / 2**20
        # Gloo aborts PowerSGD's exchanges of two buckets at a time, and by default the first bucket is a small one.
        buckets = _BUCKETS if self.variant == BUCKETS else 1
        model = DistributedDataParallel(self.net, **DDP_OPTIONS, bucket_cap_mb=1.01 * megabytes / buckets)
        if self.variant == BFLOAT16:
            model.register_comm_hook(None, bf16_compress_hook)
        if self.variant == POWER_SGD:
            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
        return model

    def step(self) -> None:
        F.cross_entropy(self.model(self.images), self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.variant == LOCAL_SGD and self.steps % _STEPS_BETWEEN_AVERAGES == 0:
            weights = torch.cat([parameter.detach().reshape(-1) for parameter in self.net.parameters()])
            dist.all_reduce(weights)
            nn.utils.vector_to_parameters(weights / dist.get_world_size(), self.net.parameters())


def measure(namespaces: list[int], rank: Rank) -> None:
    """Times the constants and all variants on one rank; rank 0 prints the milliseconds."""
    torch.set_num_threads(1)
    keep_memory()
    enter(namespaces[rank.rank])
    with _group(rank):
        works: dict[str, Callable[[], object]] = {}
        for name, elements in (("small_ms", _SMALL), ("large_ms", _LARGE)):
            works[name] = partial(dist.all_reduce, torch.zeros(elements))
        for net, make in NETWORKS.items():
            works |= {f"{net}/{variant}": _Training(make, variant).step for variant in VARIANTS}
        found = {name: 1000 * _seconds(work) for name, work in works.items()}
        if rank.is_first:
            print(json.dumps(found), flush=True)


def _seconds(work: Callable[[], object]) -> float:
    """Returns the seconds of a step on the slowest rank, the mean after the warm-up."""
    for _ in range(_WARM_UP):
        work()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(_STEPS):
        work()
    slowest = torch.tensor((time.perf_counter() - began) / _STEPS)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


@contextmanager
def _group(rank: Rank) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address(0)}:{_PORT}",
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=_SECONDS_TO_WAIT),
    )
    yield
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Makes the network, starts the ranks and returns the exit code.

    Args:
        argv: The arguments; by default the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, choices=RANKS, default=2)
    parser.add_argument("--gbit", type=float, default=1.0, help="bandwidth of each link in Gbit/s")
    parser.add_argument("--latency", type=float, default=0.1, help="latency of a message in milliseconds")
    options = parser.parse_args(argv)
    if not (0 < options.gbit < math.inf and 0 <= options.latency < math.inf):
        parser.error("--gbit must be above 0, and --latency at least 0")
    # The ranks are forked from this process: until then it must not start OpenMP's threads.
    torch.set_num_threads(1)
    try:
        link = Link(options.gbit, options.latency)
        with network(options.ranks, link) as namespaces, tempfile.TemporaryDirectory() as logs:
            launch(partial(measure, namespaces), world_size=options.ranks, max_restarts=0, logs=Path(logs))
    except LitMnistError as error:
        print_error(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
