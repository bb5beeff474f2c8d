"""The collective operations: the tensors of every rank before and after each.

gloo has all of them from torch 2.11 on in the forms used here. The list form of the all-to-all, `dist.all_to_all`, came
to gloo later: `dist.all_to_all_single` does the same with one tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from examples.collectives.group import joined, on_first
from lit_mnist.distributed.rank import Rank

SECONDS_APART = 0.1
NOTHING = "-"


@dataclass(frozen=True)
class Seen:
    """The tensors of one rank, as text.

    Attributes:
        before: Before the operation; `-` for nothing.
        after: After it.
    """

    before: str
    after: str


@dataclass(frozen=True)
class Operation:
    """One collective operation of the tour.

    Attributes:
        name: Its name in the literature.
        call: Its code.
        purpose: What training uses it for, in one sentence.
        run: Runs it on this rank; every rank must call it.
    """

    name: str
    call: str
    purpose: str
    run: Callable[[Rank], Seen]


def numbers(rank: Rank, count: int) -> torch.Tensor:
    """Returns numbers that identify their rank.

    Args:
        rank: The rank.
        count: Number of numbers.

    Returns:
        `(count,)`, int64: 1, 2, ... on rank 0, 11, 12, ... on rank 1, and so on (hundreds from ten ranks on).
    """
    return rank.rank * _step_between_ranks(rank) + torch.arange(1, count + 1)


def _step_between_ranks(rank: Rank) -> int:
    return 10 if rank.world_size < 10 else 100


def _text(tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    pieces = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return " ".join(f"[{' '.join(str(number) for number in piece.tolist())}]" for piece in pieces)


def _empty_pieces(rank: Rank) -> list[torch.Tensor]:
    return [torch.zeros(2, dtype=torch.int64) for _ in range(rank.world_size)]


def _broadcast(rank: Rank) -> Seen:
    tensor = numbers(rank, 2)
    before = _text(tensor)
    dist.broadcast(tensor, src=0)
    return Seen(before, _text(tensor))


def _scatter(rank: Rank) -> Seen:
    pieces = list(numbers(rank, 2 * rank.world_size).view(-1, 2).unbind()) if rank.is_first else None
    tensor = torch.zeros(2, dtype=torch.int64)
    dist.scatter(tensor, pieces, src=0)
    return Seen(_text(pieces) if pieces else NOTHING, _text(tensor))


def _gather(rank: Rank) -> Seen:
    tensor = numbers(rank, 2)
    pieces = _empty_pieces(rank) if rank.is_first else None
    dist.gather(tensor, pieces, dst=0)
    return Seen(_text(tensor), _text(pieces) if pieces else NOTHING)


def _all_gather(rank: Rank) -> Seen:
    tensor, pieces = numbers(rank, 2), _empty_pieces(rank)
    dist.all_gather(pieces, tensor)
    return Seen(_text(tensor), _text(pieces))


def _reduce(rank: Rank) -> Seen:
    tensor = numbers(rank, 2)
    before = _text(tensor)
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    # The tensors of the other ranks may have been used as buffers: their values are undefined.
    return Seen(before, _text(tensor) if rank.is_first else NOTHING)


def _all_reduce(rank: Rank) -> Seen:
    tensor = numbers(rank, 2)
    before = _text(tensor)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return Seen(before, _text(tensor))


def _reduce_scatter(rank: Rank) -> Seen:
    pieces = list(numbers(rank, 2 * rank.world_size).view(-1, 2).unbind())
    before = _text(pieces)
    tensor = torch.zeros(2, dtype=torch.int64)
    dist.reduce_scatter(tensor, pieces, op=dist.ReduceOp.SUM)
    return Seen(before, _text(tensor))


def _all_to_all(rank: Rank) -> Seen:
    pieces = numbers(rank, rank.world_size)
    received = torch.zeros_like(pieces)
    dist.all_to_all_single(received, pieces)
    return Seen(_text(pieces.view(-1, 1).unbind()), _text(received.view(-1, 1).unbind()))


def _barrier(rank: Rank) -> Seen:
    # On Linux and macOS all processes of a machine share the monotonic clock.
    start = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.broadcast(start, src=0)
    time.sleep(rank.rank * SECONDS_APART)
    reached = time.monotonic() - start.item()
    dist.barrier()
    left = time.monotonic() - start.item()
    return Seen(f"reached it at {reached:.2f} s", f"left it at {left:.2f} s")


OPERATIONS = (
    Operation(
        "broadcast",
        "dist.broadcast(tensor, src=0)",
        "Every rank gets rank 0's tensor: DDP wraps a model this way, so that all begin with the same weights.",
        _broadcast,
    ),
    Operation(
        "scatter",
        "dist.scatter(tensor, pieces, src=0)",
        "Rank 0 deals out one piece to each rank: one rank has read the data, and each gets its share of the batch.",
        _scatter,
    ),
    Operation(
        "gather",
        "dist.gather(tensor, pieces, dst=0)",
        "Rank 0 collects every rank's tensor: the ranks predict their shares, and one of them writes the file.",
        _gather,
    ),
    Operation(
        "all-gather",
        "dist.all_gather(pieces, tensor)",
        "Every rank collects every rank's tensor: FSDP puts a layer's weights together just before they are used.",
        _all_gather,
    ),
    Operation(
        "reduce",
        "dist.reduce(tensor, dst=0, op=ReduceOp.SUM)",
        "Rank 0 gets the sum, and the other tensors have no meaning any more: a loss that only rank 0 logs.",
        _reduce,
    ),
    Operation(
        "all-reduce",
        "dist.all_reduce(tensor, op=ReduceOp.SUM)",
        "Every rank gets the sum: DDP adds up the gradients this way in each backward pass, and divides by the ranks.",
        _all_reduce,
    ),
    Operation(
        "reduce-scatter",
        "dist.reduce_scatter(tensor, pieces, op=ReduceOp.SUM)",
        "Each rank gets the sum of one piece: FSDP and ZeRO need the gradient only of the weights that a rank keeps.",
        _reduce_scatter,
    ),
    Operation(
        "all-to-all",
        "dist.all_to_all_single(received, tensor)",
        "Piece j of rank i becomes piece i of rank j: a mixture of experts sends each token to its expert's rank.",
        _all_to_all,
    ),
    Operation(
        "barrier",
        "dist.barrier()",
        f"No rank continues before the slowest has arrived (rank r sleeps {SECONDS_APART} s times r): rank 0 "
        "downloads, then all read.",
        _barrier,
    ),
)


def show_operations(rank: Rank) -> None:
    """Runs every collective operation; rank 0 prints the tensors of each rank before and after."""
    with joined(rank):
        if rank.is_first:
            step = _step_between_ranks(rank)
            print(f"1. The collective operations, on {rank.world_size} ranks")
            print(f"   Rank 0's numbers begin at 1, rank 1's at {step + 1}: a number shows where it comes from.")
        for operation in OPERATIONS:
            seen = [Seen(**one) for one in on_first(rank, asdict(operation.run(rank)))]
            if rank.is_first:
                print(f"\n{operation.name:<16}{operation.call}\n  {operation.purpose}")
                print("\n".join(_lines(seen)), flush=True)


def _lines(seen: Sequence[Seen]) -> list[str]:
    width = max(len(one.before) for one in seen)
    return [f"  rank {number:<3} {one.before:<{width}}  ->  {one.after}" for number, one in enumerate(seen)]
