"""Batch norm on two ranks: which batch do its statistics describe?

    python -m examples.tutorial.batch_norm --bug    each rank normalizes with the statistics of its own images
    python -m examples.tutorial.batch_norm          all ranks normalize with those of the whole batch

The ranks have different data: rank 1's images are negatives. Sorted files, one per rank, have the same effect.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_mnist.data.dataset import load_dataset
from lit_mnist.data.digits.split import Split
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.sync_batch_norm import sync_batch_norm

RANKS, BATCH, STEPS, TESTED = 2, 128, 200, 1000
DATA = load_dataset()


def make_net() -> nn.Sequential:
    """Returns a network with one batch norm, in 64 bits."""
    torch.manual_seed(1)
    layers = nn.Flatten(), nn.Linear(28 * 28, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers).double()


def images_of(split: Split, rows: slice, *, negative: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images [rows, 28, 28] with pixels from -1 to 1, and their classes."""
    images = split.images[rows].double() / 127.5 - 1
    return (-images if negative else images), split.labels[rows]


def part_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a rank's part of the batch of a step."""
    share = BATCH // RANKS
    first = step * BATCH + rank * share
    return images_of(DATA.train, slice(first, first + share), negative=rank == 1)


def gradient(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Runs a forward and a backward pass, and returns the gradient as one vector."""
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def train(rank: Rank) -> None:
    """The work of each rank."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    net, alone = make_net(), make_net()
    if "--bug" not in sys.argv:
        sync_batch_norm(net, "cpu")
    ddp = DistributedDataParallel(net)

    # The first batch: 32 images on each rank, and all 64 in one process.
    found = gradient(ddp, *part_of(0, rank.rank))
    whole = gradient(alone, *(torch.cat(parts) for parts in zip(part_of(0, 0), part_of(0, 1), strict=True)))
    means = [torch.zeros(64, dtype=torch.float64) for _ in range(RANKS)]
    dist.all_gather(means, net[2].running_mean)

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(STEPS):
        gradient(ddp, *part_of(step, rank.rank))
        optimizer.step()
    if rank.is_first:
        error = (found - whole).norm() / whole.norm()
        print(f"the gradient differs from that of one process by {error:.3f} of its norm")
        print(f"running mean of channel 0 on rank 0 {means[0][0]:+.4f}, on rank 1 {means[1][0]:+.4f}, ", end="")
        print(f"in one process {alone[2].running_mean[0]:+.4f}")
        # The network of rank 0 is the one that is saved.
        net.eval()
        for name, negative in (("images", False), ("negatives", True)):
            images, labels = images_of(DATA.test, slice(TESTED), negative=negative)
            correct = int((net(images).argmax(dim=1) == labels).sum())
            print(f"after {STEPS} steps, test accuracy on {name}: {correct / TESTED:.1%} ({correct} of {TESTED})")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        launch(train, world_size=RANKS, max_restarts=0, logs=Path(folder))
