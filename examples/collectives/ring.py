"""Two all-reduces written with point-to-point calls, which count what they send: the ring and the parameter server.

Both add the tensors of all ranks in place. In the ring each rank communicates with its two neighbors only and sends
2 (N - 1) / N times the data; no all-reduce needs less on its busiest rank. The server, rank 0, sends N - 1 times the
data and receives as much.

Source of the ring: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
Journal of Parallel and Distributed Computing 69 (2009).
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class Line:
    """Sends and receives tensors, and counts the bytes at each send.

    Attributes:
        bytes_sent: Bytes of the tensors that were sent, without the overhead of the network.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0

    def send(self, tensor: torch.Tensor, rank: int) -> list[dist.Work]:
        """Starts to send a contiguous tensor to a rank; an empty one is not sent.

        Returns:
            The work to wait for, at most one.
        """
        if not tensor.numel():
            return []
        self.bytes_sent += tensor.numel() * tensor.element_size()
        return [_checked(dist.isend(tensor, rank))]

    def receive(self, tensor: torch.Tensor, rank: int) -> list[dist.Work]:
        """Starts to receive a contiguous tensor from a rank; an empty one is not received."""
        return [_checked(dist.irecv(tensor, rank))] if tensor.numel() else []


def _checked(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank belongs to no group"
    return work


def ring_all_reduce(tensor: torch.Tensor, line: Line) -> None:
    """Replaces a tensor by the sum over all ranks, around a ring.

    The tensor is split into one chunk per rank. In the first half (reduce-scatter) every chunk travels around the ring
    and each rank adds its own part, so that the sum of chunk r + 1 is complete on rank r. In the second half
    (all-gather) the sums travel once more. Each sum is computed on one rank and copied: all ranks get identical bits.

    Args:
        tensor: Any shape and dtype that gloo sends, contiguous, equal on all ranks; may have fewer elements than
            there are ranks.
        line: Counts what this rank sends.

    Raises:
        RuntimeError: The tensor is not contiguous, or a rank did not call it within the group's timeout.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    chunks = tensor.view(-1).tensor_split(world_size)
    # If the size cannot be divided, the first chunks are the largest.
    scratch = torch.empty_like(chunks[0])

    for step in range(world_size - 1):
        outgoing, own = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        incoming = scratch[: own.numel()]
        _wait(line.receive(incoming, left) + line.send(outgoing, right))
        own += incoming

    for step in range(world_size - 1):
        outgoing, own = chunks[(rank - step + 1) % world_size], chunks[(rank - step) % world_size]
        _wait(line.receive(own, left) + line.send(outgoing, right))


def server_all_reduce(tensor: torch.Tensor, line: Line) -> None:
    """Replaces a tensor by the sum over all ranks, which rank 0 computes in rank order as a server.

    Args:
        tensor: Any shape and dtype that gloo sends, contiguous, the same on all ranks.
        line: Counts what this rank sends.

    Raises:
        RuntimeError: A rank did not come within the group's time-out.
    """
    if dist.get_rank() != 0:
        _wait(line.send(tensor, 0))
        _wait(line.receive(tensor, 0))
        return
    others = range(1, dist.get_world_size())
    incoming = torch.empty_like(tensor)
    for other in others:
        _wait(line.receive(incoming, other))
        tensor += incoming
    _wait([work for other in others for work in line.send(tensor, other)])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
