"""Every rank prints the variables through which its launcher tells it which rank it is.

torchrun --standalone --nproc-per-node 2 -m examples.tutorial.ranks
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
)


def main() -> int:
    """Joins the group, adds a number to a sum over all ranks, and prints the variables."""
    # Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The default timeout with gloo is 30 minutes.
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=2 if "--impatient" in sys.argv else 60))
    except dist.DistError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    for rank in range(dist.get_world_size()):
        # One after the other, so that the lines do not mix.
        dist.barrier()
        if rank == dist.get_rank():
            print(", ".join(f"{name}={os.environ.get(name)}" for name in VARIABLES[:3]), flush=True)
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        for name in VARIABLES[3:]:
            print(f"{name}={os.environ.get(name)}")
        print(f"the sum of all ranks' numbers is {total}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
