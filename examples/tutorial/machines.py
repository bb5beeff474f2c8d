"""Two machines with two ranks each: who reads which sample, and who saves?

    python -m examples.tutorial.machines --bug    each rank uses LOCAL_RANK, its number on its machine
    python -m examples.tutorial.machines          each rank uses RANK, its number among all

Both start the four ranks on this machine, with the variables that torchrun sets on two machines. Under torchrun, the
program is one of the ranks.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

MACHINES, RANKS_PER_MACHINE, SAMPLES = 2, 2, 1000
BUG = "--bug" in sys.argv


def train() -> None:
    """Counts the readers of each sample and the writers of the checkpoint."""
    dist.init_process_group("gloo")
    number = int(os.environ["LOCAL_RANK" if BUG else "RANK"])
    count = int(os.environ["LOCAL_WORLD_SIZE" if BUG else "WORLD_SIZE"])
    readers = torch.zeros(SAMPLES, dtype=torch.int64)
    readers[list(DistributedSampler(range(SAMPLES), count, number, seed=1))] = 1
    writers = torch.tensor(int(number == 0))
    dist.all_reduce(readers)
    dist.all_reduce(writers)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {os.environ['LOCAL_WORLD_SIZE']} on each machine")
        for ranks in range(1, int(readers.max()) + 1):
            print(f"samples that {ranks} of them read: {int((readers == ranks).sum())}")
        print(f"ranks that save: {int(writers)}", flush=True)
    dist.destroy_process_group()


def on_a_machine(rank: Rank) -> None:
    """Changes the variables of a rank to those on its machine."""
    os.environ["LOCAL_RANK"] = str(rank.rank % RANKS_PER_MACHINE)
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_MACHINE)
    train()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        train()
    else:
        with tempfile.TemporaryDirectory() as folder:
            launch(on_a_machine, world_size=MACHINES * RANKS_PER_MACHINE, max_restarts=0, logs=Path(folder))
