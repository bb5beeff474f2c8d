"""What a time-out looks like: one rank never comes to a collective, and the others are told."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from examples.collectives.group import joined, on_first
from lit_mnist.distributed.rank import Rank

SECONDS = 2


def show_timeout(rank: Rank) -> None:
    """Lets the last rank stay away from an all-reduce, and rank 0 print how that ended for each rank.

    The all-reduce has a group of its own with a short time-out, so that the ranks can still talk about it in theirs.

    Raises:
        RuntimeError: The all-reduce ended without an error.
    """
    with joined(rank):
        # A group with a short time-out is made within that time too: the ranks come to it together.
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=SECONDS))
        is_missing = rank.rank == rank.world_size - 1
        told = on_first(rank, "stayed away" if is_missing else _wait_in_vain(group))
    if rank.is_first:
        print(f"\n\n3. A time-out: rank {rank.world_size - 1} never comes to an all-reduce that waits {SECONDS} s")
        for number, line in enumerate(told):
            print(f"  rank {number:<3} {line}", flush=True)


def _wait_in_vain(group: dist.ProcessGroup | int | None) -> str:
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)  # type: ignore[arg-type]
    except RuntimeError as error:
        # gloo begins with the place in its own source.
        message = re.sub(r"^\[[^]]*\]\s*", "", str(error)).splitlines()[0]
        return f"gave up after {time.monotonic() - start:.1f} s: {type(error).__name__}: {message}"
    raise RuntimeError("the all-reduce ended although one rank stayed away")
