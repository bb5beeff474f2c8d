"""Accelerate on two ranks: the learning rate should fall from 0.1 to 0 in ten steps.

python -m examples.tutorial.schedules --bug    the schedule is prepared, too, and is stepped once per rank
python -m examples.tutorial.schedules          only the network and the optimizer are prepared
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

RANKS, STEPS, BATCH = 2, 10, 32
BUG = "--bug" in sys.argv
DATA = load_dataset().train


def train(rank: Rank) -> None:
    """The work of each rank."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=STEPS)
    net, optimizer = accelerator.prepare(net, optimizer)
    if BUG:
        schedule = accelerator.prepare(schedule)
    rates, changed = [], 0
    for step in range(STEPS):
        # No loader is prepared: the loop cuts the global batch itself.
        first = BATCH * (RANKS * step + rank.rank)
        images, labels = DATA.images[first : first + BATCH], DATA.labels[first : first + BATCH]
        accelerator.backward(F.cross_entropy(net(images / 255), labels))
        before = [weight.clone() for weight in net.parameters()]
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        changed += any(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    if rank.is_first:
        print("learning rates:", *(f"{rate:.2f}" for rate in rates))
        print(f"{changed} of {STEPS} steps changed the weights")
    accelerator.end_training()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    # If it is not set, Accelerate sets it and warns.
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        launch(train, world_size=RANKS, max_restarts=0, logs=Path(folder))
