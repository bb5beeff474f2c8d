"""What a training step is made of: the samples of each rank, and what the ranks share, message by message.

DistributedDataParallel sends gradients in buckets, in the order in which the backward pass finishes them: the last
layers' first. A bucket travels while the backward pass computes those after it; only the last one has nothing left to
hide behind (Li et al.: PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

# Bytes from which on DistributedDataParallel closes its first bucket, which is to leave early, and the others.
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
# The backward pass's share of the computing: it multiplies twice where the forward pass does once, by the weights and
# by the inputs; and thrice where it computes the forward pass again.
BACKWARD, BACKWARD_AGAIN = 2 / 3, 3 / 4
_ELEMENT = 4


@dataclass(frozen=True)
class Collective:
    """Something that all ranks do together in each step.

    Attributes:
        kind: `all_reduce`, in a ring; `exchange`: each rank sends its tensor to every other; `server`: one rank
            gathers, averages and sends back.
        bytes: Size of each rank's own tensor.
        hideable: Whether it can travel while the backward pass computes.
    """

    kind: Literal["all_reduce", "exchange", "server"]
    bytes: int
    hideable: bool = False

    def rounds(self, ranks: int) -> int:
        """Returns how many messages the busiest rank takes, one after the other."""
        return (ranks - 1) * (1 if self.kind == "exchange" else 2)

    def hops(self, ranks: int) -> int:
        """Returns how often the network's latency must be waited for: what comes from many at once waits once."""
        most = {"all_reduce": self.rounds(ranks), "exchange": 1, "server": 2}[self.kind]
        return min(most, self.rounds(ranks))

    def sent(self, ranks: int) -> float:
        """Returns the bytes that the busiest rank sends."""
        if self.kind == "all_reduce":
            return 2 * (ranks - 1) / ranks * self.bytes
        return float((ranks - 1) * self.bytes)

    def moved(self, ranks: int) -> float:
        """Returns the bytes that the busiest rank moves one after the other: a server takes all before it sends."""
        return self.sent(ranks) * (2 if self.kind == "server" else 1)

    def crowding(self, ranks: int, cores: float) -> float:
        """Returns by which factor it takes longer where the ranks share cores; 1 where there are enough."""
        # A tensor of few numbers has not one for each rank: the others have nothing to do.
        at_work = 2 if self.kind == "server" else ranks
        if self.kind == "all_reduce":
            at_work = min(ranks, math.ceil(self.bytes / _ELEMENT))
        return max(1.0, at_work / cores)


@dataclass(frozen=True)
class Workload:
    """What a step of one program is made of, on any number of ranks.

    Attributes:
        name: Its name.
        loop: Name of the code that computes: workloads of the same loop take the same time per sample.
        samples: Samples of a step on each rank.
        collectives: What the ranks share in a step, where there are several.
        micro_batches: Micro-batches of a step: gradients can hide behind the last one's backward pass alone.
        backward: The backward pass's share of the computing.
    """

    name: str
    loop: str
    samples: int
    collectives: Sequence[Collective] = ()
    micro_batches: int = 1
    backward: float = BACKWARD


def gradient_buckets(net: nn.Module, element: int = _ELEMENT) -> list[int]:
    """Returns the bytes of DistributedDataParallel's buckets in the order in which they travel.

    It fills them in the order in which gradients came in the first step, which is taken to be the reverse of the
    parameters' own; one that a parameter fills to the limit is closed.

    Args:
        net: The network; its parameters need hold no values (device `meta`).
        element: Bytes of a gradient's element.
    """
    sizes, filled = list[int](), 0
    for parameter in reversed([parameter for parameter in net.parameters() if parameter.requires_grad]):
        filled += element * parameter.numel()
        if filled >= (BUCKET if sizes else FIRST_BUCKET):
            sizes.append(filled)
            filled = 0
    return [*sizes, filled] if filled else sizes


def ddp_gradient(net: nn.Module, element: int = _ELEMENT) -> list[Collective]:
    """Returns how DistributedDataParallel shares the gradients: only the last bucket cannot hide."""
    *early, last = gradient_buckets(net, element)
    return [*(Collective("all_reduce", size, hideable=True) for size in early), Collective("all_reduce", last)]


def server_gradient(net: nn.Module, element: int = _ELEMENT) -> list[Collective]:
    """Returns how a parameter server shares the gradients: whole, after the backward pass."""
    return [Collective("server", element * sum(parameter.numel() for parameter in net.parameters()))]


def batch_norm(net: nn.Module, element: int = _ELEMENT, *, gpu: bool = False) -> list[Collective]:
    """Returns what synchronised batch norm shares in a micro-batch; the next layer waits for it, so nothing hides.

    The project's own exchanges each layer's means, squared deviations and count in the forward pass, and two sums per
    channel in the backward pass. torch's own, on GPUs, gathers the former, too, and all-reduces the latter.
    """
    channels = [layer.num_features for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    backward: Literal["all_reduce", "exchange"] = "all_reduce" if gpu else "exchange"
    return [
        each
        for count in channels
        for each in (Collective("exchange", element * (2 * count + 1)), Collective(backward, element * 2 * count))
    ]
