"""A timeout: one rank does not call a collective, and the others raise an error."""

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
    """Calls an all-reduce on all ranks except the last; rank 0 prints the result of each rank.

    The all-reduce uses a separate group with a short timeout, so that the first group stays usable.

    Raises:
        RuntimeError: The all-reduce ended without an error.
    """
    with joined(rank):
        # The timeout also applies to the creation of the group.
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=SECONDS))
        is_missing = rank.rank == rank.world_size - 1
        told = on_first(rank, "did not call it" if is_missing else _wait_in_vain(group))
    if rank.is_first:
        print(f"\n\n3. A timeout: rank {rank.world_size - 1} does not call an all-reduce that waits {SECONDS} s")
        for number, line in enumerate(told):
            print(f"  rank {number:<3} {line}", flush=True)


def _wait_in_vain(group: dist.ProcessGroup | int | None) -> str:
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)  # type: ignore[arg-type]
    except RuntimeError as error:
        # gloo's message begins with a place in its source.
        message = re.sub(r"^\[[^]]*\]\s*", "", str(error)).splitlines()[0]
        return f"timed out after {time.monotonic() - start:.1f} s: {type(error).__name__}: {message}"
    raise RuntimeError("the all-reduce ended although one rank did not call it")
