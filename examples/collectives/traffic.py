"""The bytes that the ranks send in an all-reduce: the ring compared with the parameter server."""

from __future__ import annotations

import torch
import torch.distributed as dist

from examples.collectives.group import joined, on_first
from examples.collectives.ring import Line, ring_all_reduce, server_all_reduce
from lit_mnist.distributed.rank import Rank

ELEMENTS = 1_000_000


def show_traffic(rank: Rank) -> None:
    """Sums the same numbers with both algorithms; rank 0 prints the bytes that each rank sent.

    Raises:
        RuntimeError: The sum differs from that of `dist.all_reduce`.
    """
    with joined(rank):
        sent = on_first(rank, count_sent_bytes(rank, ELEMENTS))
    if rank.is_first:
        print("\n".join(_table(sent, ELEMENTS * 4)), flush=True)


def count_sent_bytes(rank: Rank, elements: int) -> tuple[int, int]:
    """Returns the bytes that this rank sends to sum float32 numbers: with the ring and with the server.

    Args:
        rank: This rank.
        elements: Number of elements per rank.

    Raises:
        RuntimeError: The sum differs from that of `dist.all_reduce`.
    """
    # The sums of integers are exact in any order.
    generator = torch.Generator().manual_seed(rank.rank)
    own = torch.randint(-1000, 1000, (elements,), generator=generator).float()
    expected = own.clone()
    dist.all_reduce(expected)
    sent = []
    for all_reduce in (ring_all_reduce, server_all_reduce):
        tensor, line = own.clone(), Line()
        all_reduce(tensor, line)
        if not torch.equal(tensor, expected):
            raise RuntimeError(f"{all_reduce.__name__} gave a sum that differs from dist.all_reduce")
        sent.append(line.bytes_sent)
    return sent[0], sent[1]


def _table(sent: list[tuple[int, int]], size: int) -> list[str]:
    count = len(sent)
    ring, server = zip(*sent, strict=True)
    rows = [(f"rank {number}", *pair) for number, pair in enumerate(sent)]
    rows += [("busiest", max(ring), max(server)), ("all", sum(ring), sum(server))]
    formula = 2 * (count - 1) / count * size
    return [
        f"\n\n4. Bytes sent in an all-reduce of {size:,} bytes on {count} ranks, counted at the calls of isend",
        "   Both gave the sum of dist.all_reduce on every rank, bit for bit.",
        "",
        f"  {'':<10}{'ring':>14}{'server':>14}",
        *(f"  {name:<10}{by_ring:>14,}{by_server:>14,}" for name, by_ring, by_server in rows),
        "",
        f"  By the formulas: ring 2 (N - 1) / N of the data = {formula:,.0f} on each rank,",
        f"  server (N - 1) times the data = {(count - 1) * size:,} on rank 0. Together both send the same;",
        "  the ring distributes it evenly.",
    ]
