"""Two ranks add up the same two counts, one all-reduce for each.

python -m examples.tutorial.order --bug    in the order of each rank's own dictionary
python -m examples.tutorial.order          in the order of the names
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

BUG = "--bug" in sys.argv
# What each rank has counted in its half of the test set. A dictionary keeps the order in which it was filled.
COUNTED = [{"samples": 5000, "correct": 4900}, {"correct": 4800, "samples": 5000}]


def evaluate(rank: Rank) -> None:
    """The work of each rank."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    own, total = COUNTED[rank.rank], {}
    for name in own if BUG else sorted(own):
        count = torch.tensor(own[name])
        dist.all_reduce(count)
        total[name] = int(count)
    # Rank 0 prints what each rank has found.
    found = [torch.zeros(2, dtype=torch.int64) for _ in range(rank.world_size)]
    dist.all_gather(found, torch.tensor([total["correct"], total["samples"]]))
    if rank.is_first:
        for number, (correct, samples) in enumerate(found):
            print(f"rank {number}: {correct} of {samples} correct, {correct / samples:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        launch(evaluate, world_size=2, max_restarts=0, logs=Path(folder))
