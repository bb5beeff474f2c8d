"""Steps of several ranks over a network, with what can be exchanged in each.

    python -m benchmarks.variants --ranks 4 --gbit 1 --latency 0.1    milliseconds of a step of each, as JSON

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
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import INTERFACE, Link, Network, address, enter, network
from benchmarks.programs import launch_ranks
from lit_mnist.distributed.ddp_arguments import DDP_OPTIONS
from lit_mnist.distributed.rank import Rank, keep_memory
from lit_mnist.distributed.terminal import print_error
from lit_mnist.errors import LitMnistError
from lit_mnist.models.convnet import ConvNet

RANKS = (2, 4, 8)
ALONE, DDP, BUCKETS = "no communication", "DDP", "DDP, four buckets"
BFLOAT16, POWER_SGD, LOCAL_SGD = "DDP, bfloat16", "DDP, PowerSGD", "local SGD"
STEPS_BETWEEN_AVERAGES = 8
# Elements of the two all-reduces that give the constants of a network.
SMALL, LARGE = 256, 2_000_000
_BUCKETS, _BATCH, _WARM_UP, _STEPS, _SMALL_STEPS = 4, 16, 2, 8, 64
_PORT, _SECONDS_TO_WAIT = 29_500, 120


def _perceptron() -> nn.Module:
    """Two hidden layers of 1,024 units."""
    wide = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *wide, nn.Linear(1024, 10))


# Each with its variants: the gradients of the ConvNet fit into a message or two.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "ConvNet": (ConvNet, (ALONE, DDP, BFLOAT16, LOCAL_SGD)),
    "perceptron": (_perceptron, (ALONE, DDP, BUCKETS, BFLOAT16, POWER_SGD, LOCAL_SGD)),
}


def count_parameters(net: str) -> int:
    """Returns the number of parameters of a network."""
    return sum(parameter.numel() for parameter in NETWORKS[net][0]().parameters())


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
            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=_WARM_UP), powerSGD_hook)
        return model

    def step(self) -> None:
        F.cross_entropy(self.model(self.images), self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.variant == LOCAL_SGD and self.steps % STEPS_BETWEEN_AVERAGES == 0:
            weights = torch.cat([parameter.detach().reshape(-1) for parameter in self.net.parameters()])
            dist.all_reduce(weights)
            nn.utils.vector_to_parameters(weights / dist.get_world_size(), self.net.parameters())


def measure(made: Network, rank: Rank) -> None:
    """Times the constants and all variants on one rank; rank 0 prints the milliseconds."""
    torch.set_num_threads(1)
    keep_memory()
    enter(made.namespaces[rank.rank])
    with _group(rank):
        found: dict[str, float] = {}
        for name, elements, steps in (("small", SMALL, _SMALL_STEPS), ("large", LARGE, _STEPS)):
            work = partial(dist.all_reduce, torch.zeros(elements))
            found[f"{name}_ms"], found[f"{name}_cpu_ms"] = _milliseconds(work, steps, made)
        for net, (make, variants) in NETWORKS.items():
            for variant in variants:
                found[f"{net}/{variant}"], _ = _milliseconds(_Training(make, variant).step, _STEPS, made)
        if rank.is_first:
            print(json.dumps(found), flush=True)


def _milliseconds(work: Callable[[], object], steps: int, made: Network) -> tuple[float, float]:
    """Returns the milliseconds of a step on the slowest rank, and those of a core for all ranks and the network."""
    for _ in range(_WARM_UP):
        work()
    dist.barrier()
    network_before = made.cpu_seconds()
    before, cpu_before = time.perf_counter(), time.process_time()
    for _ in range(steps):
        work()
    seconds, cpu_seconds = time.perf_counter() - before, time.process_time() - cpu_before
    network_seconds = made.cpu_seconds() - network_before
    slowest, total = torch.tensor(seconds), torch.tensor(cpu_seconds)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return 1000 * float(slowest) / steps, 1000 * (float(total) + network_seconds) / steps


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", allow_abbrev=False)
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
        with network(options.ranks, link) as made:
            launch_ranks(partial(measure, made), options.ranks)
    except LitMnistError as error:
        print_error(f"error: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
