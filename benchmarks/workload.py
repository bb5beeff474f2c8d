"""The communication of a training step: what the ranks exchange, message by message.

DistributedDataParallel sends gradients in buckets, in the order in which the backward pass finishes them: the last
layers' first. A bucket is sent while the backward pass computes those after it; only the last one cannot overlap with
it (Li et al.: PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

# The bytes at which DistributedDataParallel closes its first bucket, which is to be sent early, and the others.
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
# The share of the backward pass in the computing: it multiplies twice where the forward pass does once, by the weights
# and by the inputs; and three times if it computes the forward pass again.
BACKWARD, BACKWARD_WITH_RECOMPUTATION = 2 / 3, 3 / 4
_ELEMENT = 4


@dataclass(frozen=True)
class Collective:
    """A communication in which all ranks take part in each step.

    Attributes:
        kind: `all_reduce`, in a ring; `exchange`: each rank sends its tensor to every other; `server`: one rank
            gathers, averages and sends back.
        bytes: Size of the tensor of each rank.
        overlaps: Whether it can run while the backward pass computes.
    """

    kind: Literal["all_reduce", "exchange", "server"]
    bytes: int
    overlaps: bool = False

    def hops(self, ranks: int) -> int:
        """Returns how often the latency of the network counts: messages from many ranks at once count once."""
        if ranks == 1:
            return 0
        return {"all_reduce": 2 * (ranks - 1), "exchange": 1, "server": 2}[self.kind]

    def sent(self, ranks: int) -> float:
        """Returns the bytes that the busiest rank sends."""
        if self.kind == "all_reduce":
            return 2 * (ranks - 1) / ranks * self.bytes
        return float((ranks - 1) * self.bytes)

    def moved(self, ranks: int) -> float:
        """Returns the bytes that the busiest rank transfers one after the other: a server receives before it sends."""
        return self.sent(ranks) * (2 if self.kind == "server" else 1)


@dataclass(frozen=True)
class Workload:
    """A training step of one program, on any number of ranks.

    Attributes:
        samples: Samples of a step on each rank.
        collectives: The communication of a step, if there are several ranks.
        micro_batches: Micro-batches of a step: gradients overlap with the backward pass of the last one only.
        backward: The share of the backward pass in the computing.
    """

    samples: int
    collectives: Sequence[Collective] = ()
    micro_batches: int = 1
    backward: float = BACKWARD

    def seconds(
        self, ranks: int, seconds_per_sample: float, bandwidth_bytes_per_s: float, latency_s: float, *, overlap: bool
    ) -> float:
        """Returns the time of a step on ranks that each have a device of their own.

        Args:
            ranks: Number of ranks.
            seconds_per_sample: Time in which a device computes a sample.
            bandwidth_bytes_per_s: Bytes per second that a rank sends, and at the same time receives.
            latency_s: Seconds that an empty message takes.
            overlap: Whether everything that can overlap with the backward pass does.
        """
        compute = seconds_per_sample * self.samples
        if ranks == 1:
            return compute
        times = [each.hops(ranks) * latency_s + each.moved(ranks) / bandwidth_bytes_per_s for each in self.collectives]
        early = sum(time for time, each in zip(times, self.collectives, strict=True) if overlap and each.overlaps)
        return compute + sum(times) - min(early, self.backward * compute / self.micro_batches)


def gradient_buckets(net: nn.Module, element: int = _ELEMENT) -> list[int]:
    """Returns the bytes of DistributedDataParallel's buckets in the order in which they are sent.

    It fills them in the order in which gradients were computed in the first step, which is assumed to be the reverse
    of the parameters' own. A bucket that a parameter fills to the limit is closed.

    Args:
        net: The network; its parameters need no values (device `meta`).
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
    """Returns how DistributedDataParallel reduces the gradients: all buckets but the last can overlap."""
    *early, last = gradient_buckets(net, element)
    return [*(Collective("all_reduce", size, overlaps=True) for size in early), Collective("all_reduce", last)]


def server_gradient(net: nn.Module, element: int = _ELEMENT) -> list[Collective]:
    """Returns how a parameter server reduces the gradients: all at once, after the backward pass."""
    return [Collective("server", element * sum(parameter.numel() for parameter in net.parameters()))]


def batch_norm(net: nn.Module, element: int = _ELEMENT, *, gpu: bool = False) -> list[Collective]:
    """Returns the communication of synchronized batch norm in a micro-batch; the next layer waits for it.

    The project's own exchanges the means, squared deviations and count of each layer in the forward pass, and two sums
    per channel in the backward pass. torch's own, on GPUs, gathers the former, too, and all-reduces the latter.
    """
    channels = [layer.num_features for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    backward: Literal["all_reduce", "exchange"] = "all_reduce" if gpu else "exchange"
    return [
        each
        for count in channels
        for each in (Collective("exchange", element * (2 * count + 1)), Collective(backward, element * 2 * count))
    ]
