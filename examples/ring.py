"""Why DDP has no parameter server: the bytes that each rank sends to sum a gradient, counted at every send.

    torchrun --standalone --nproc-per-node 4 examples/ring.py

With a parameter server, every rank sends its gradient to rank 0, which adds them and sends the sum back: of N ranks,
rank 0 sends N - 1 times the gradient, and its link limits all. In a ring, each rank sends pieces to its right neighbor
only, in all 2 (N - 1) / N times the gradient, which is less than twice for any number of ranks. The total is the same,
but the ring spreads it evenly. No algorithm sends less on its busiest rank: Patarasuk and Yuan, Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations (2009).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn


class Link:
    """Sends and receives, and counts.

    Attributes:
        bytes_sent: Bytes of the tensors that this rank has sent.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0

    def send(self, tensor: torch.Tensor, rank: int) -> dist.Work:
        """Starts to send a tensor, which must not change before `wait`."""
        self.bytes_sent += tensor.numel() * tensor.element_size()
        work = dist.isend(tensor, rank)
        assert work is not None
        return work

    def exchange(self, outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
        """Sends one tensor and receives another at the same time."""
        work = self.send(outgoing, to)
        dist.recv(incoming, source)
        work.wait()


def server_all_reduce(gradient: torch.Tensor, link: Link) -> None:
    """Replaces a gradient by the sum over all ranks, which rank 0 computes."""
    if dist.get_rank() == 0:
        others = range(1, dist.get_world_size())
        incoming = torch.empty_like(gradient)
        for rank in others:
            dist.recv(incoming, rank)
            gradient += incoming
        for work in [link.send(gradient, rank) for rank in others]:
            work.wait()
    else:
        link.send(gradient, 0).wait()
        dist.recv(gradient, 0)


def ring_all_reduce(gradient: torch.Tensor, link: Link) -> None:
    """Replaces a gradient by the sum over all ranks, in 2 (N - 1) steps around a ring.

    The gradient is cut into N pieces. In the first half (reduce-scatter), each rank adds its part to a piece and passes
    it on: then each rank holds the sum of one piece. In the second half (all-gather), the sums go around once more.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    pieces = gradient.tensor_split(world_size)
    for step in range(world_size - 1):
        piece = pieces[(rank - step - 1) % world_size]
        incoming = torch.empty_like(piece)
        link.exchange(pieces[(rank - step) % world_size], right, incoming, left)
        piece += incoming
    for step in range(world_size - 1):
        link.exchange(pieces[(rank - step + 1) % world_size], right, pieces[(rank - step) % world_size], left)


def main() -> dict[str, list[int]]:
    """Sums a gradient with both; returns the bytes that each rank sent, and rank 0 prints them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # The number of parameters is divisible by 2, 3 and 4, so that all pieces of the ring are equally large.
    net = nn.Sequential(nn.Linear(784, 120), nn.ReLU(), nn.Linear(120, 12))
    inputs = torch.randn(64, 784, generator=torch.Generator().manual_seed(rank))
    net(inputs).square().mean().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in net.parameters() if parameter.grad is not None])
    expected = gradient.clone()
    dist.all_reduce(expected)

    sent = {}
    for name, all_reduce in (("server", server_all_reduce), ("ring", ring_all_reduce)):
        total, link = gradient.clone(), Link()
        all_reduce(total, link)
        # The ranks are added in another order, so that the last bits may differ.
        torch.testing.assert_close(total, expected)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(counts, torch.tensor([link.bytes_sent]))
        sent[name] = [int(count) for count in counts]

    if rank == 0:
        size = gradient.numel() * gradient.element_size()
        print(f"bytes sent to sum a gradient of {size:,} bytes on {world_size} ranks")
        print(f"  {'':8}{'parameter server':>18}{'ring':>14}")
        for each, (by_server, by_ring) in enumerate(zip(sent["server"], sent["ring"], strict=True)):
            print(f"  rank {each:<3}{by_server:>18,}{by_ring:>14,}")
        busiest = (world_size - 1) * size, 2 * (world_size - 1) * size // world_size
        print(f"  formula {busiest[0]:>17,}{busiest[1]:>14,}   of the busiest rank")
    return sent


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo uses loopback
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
