"""The collective operations of torch.distributed: what every rank holds before and after each, and who uses it.

    torchrun --standalone --nproc-per-node 3 examples/collectives.py

Rank r begins with numbers from 10 r + 1 on, so that each number shows where it comes from. Every rank must call every
collective, in the same order: a rank that leaves one out lets the others wait until the timeout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Shown = tuple[str, str]  # before and after, as text


def numbers(count: int) -> torch.Tensor:
    """Returns 1, 2, ... on rank 0, 11, 12, ... on rank 1, and so on."""
    return 10 * dist.get_rank() + torch.arange(1, count + 1)


def empty() -> list[torch.Tensor]:
    """Returns a place for two numbers of each rank."""
    return [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]


def text(tensors: torch.Tensor | Sequence[torch.Tensor] | None) -> str:
    """Returns the numbers of one or several tensors."""
    pieces = [tensors] if isinstance(tensors, torch.Tensor) else tensors or []
    return " ".join(str(piece.tolist()) for piece in pieces) or "-"


def broadcast() -> Shown:
    """Every rank gets rank 0's tensor: DDP does this with the weights when it wraps a model."""
    tensor = numbers(2)
    before = text(tensor)
    dist.broadcast(tensor, src=0)
    return before, text(tensor)


def all_reduce() -> Shown:
    """Every rank gets the sum: DDP does this with the gradients in each backward pass."""
    tensor = numbers(2)
    before = text(tensor)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return before, text(tensor)


def reduce() -> Shown:
    """Rank 0 gets the sum; what the others hold afterwards is undefined: a loss that rank 0 logs."""
    tensor = numbers(2)
    before = text(tensor)
    dist.reduce(tensor, dst=0, op=dist.ReduceOp.SUM)
    return before, text(tensor if dist.get_rank() == 0 else None)


def all_gather() -> Shown:
    """Every rank gets all tensors, in the order of the ranks: FSDP does this with a layer's weights before it runs."""
    tensor, pieces = numbers(2), empty()
    dist.all_gather(pieces, tensor)
    return text(tensor), text(pieces)


def reduce_scatter() -> Shown:
    """Each rank gets the sum of one piece: FSDP does this with gradients, as a rank keeps a part of the weights."""
    pieces, tensor = list(numbers(2 * dist.get_world_size()).split(2)), torch.zeros(2, dtype=torch.int64)
    before = text(pieces)
    dist.reduce_scatter(tensor, pieces, op=dist.ReduceOp.SUM)
    return before, text(tensor)


def scatter() -> Shown:
    """Rank 0 gives each rank one piece: a batch that one rank has read."""
    pieces = list(numbers(2 * dist.get_world_size()).split(2)) if dist.get_rank() == 0 else None
    tensor = torch.zeros(2, dtype=torch.int64)
    dist.scatter(tensor, pieces, src=0)
    return text(pieces), text(tensor)


def gather() -> Shown:
    """Rank 0 gets all tensors: predictions that one rank saves."""
    tensor, pieces = numbers(2), empty() if dist.get_rank() == 0 else None
    dist.gather(tensor, pieces, dst=0)
    return text(tensor), text(pieces)


def all_to_all() -> Shown:
    """Number j of rank i becomes number i of rank j: tokens that go to their experts in a mixture of experts."""
    tensor = numbers(dist.get_world_size())
    received = torch.zeros_like(tensor)
    dist.all_to_all_single(received, tensor)
    return text(tensor), text(received)


def send_and_receive() -> Shown:
    """Each rank sends to the next and receives from the one before: activations between the stages of a pipeline."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor, received = numbers(2), torch.zeros(2, dtype=torch.int64)
    # If all ranks called dist.send first, each could wait for the other's dist.recv forever: isend does not wait.
    sending = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    assert sending is not None
    sending.wait()
    return text(tensor), text(received)


def barrier() -> Shown:
    """No rank continues before all have arrived (rank r sleeps 0.1 r seconds): rank 0 writes a file, then all read."""
    dist.barrier()
    start = time.monotonic()
    time.sleep(0.1 * dist.get_rank())
    before = f"arrives after {time.monotonic() - start:.1f} s"
    dist.barrier()
    return before, f"continues after {time.monotonic() - start:.1f} s"


OPERATIONS: tuple[Callable[[], Shown], ...] = (
    *(broadcast, all_reduce, reduce, all_gather, reduce_scatter, scatter, gather, all_to_all, send_and_receive),
    barrier,
)


def main() -> dict[str, list[Shown]]:
    """Runs every operation; rank 0 prints and returns what the ranks held before and after."""
    shown = {}
    for operation in OPERATIONS:
        ranks: list[Shown] = [("", "")] * dist.get_world_size()
        dist.all_gather_object(ranks, operation())
        shown[operation.__name__] = ranks
        if dist.get_rank() == 0:
            print(f"\n{operation.__name__}: {operation.__doc__}")
            width = max(len(before) for before, _ in ranks)
            for rank, (before, after) in enumerate(ranks):
                print(f"  rank {rank}  {before:{width}}  ->  {after}", flush=True)
    return shown


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo uses loopback
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
