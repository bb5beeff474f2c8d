"""Accumulation on two ranks: four micro-batches must give the gradient of one batch of all their images.

python -m examples.tutorial.accumulation --bug     three usual mistakes
python -m examples.tutorial.accumulation           three correct ways
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

RANKS = 2
EVEN, UNEVEN = (16, 16, 16, 16), (16, 16, 16, 2)
TRAIN = load_dataset().train


@dataclass
class Way:
    """A way to accumulate: the sizes of a rank's micro-batches, and what is done with each."""

    name: str
    sizes: tuple[int, ...] = EVEN
    divide: str = "by the number of micro-batches"
    reduces: tuple[bool, ...] = (False, False, False, True)


WRONG = (
    Way("the loss is not divided", divide="not"),
    Way("no_sync on the last micro-batch", reduces=(True, True, True, False)),
    Way("mean of 16, 16, 16 and 2 images", sizes=UNEVEN),
)
RIGHT = (
    Way("divided, no_sync on all but the last"),
    Way("divided, without no_sync", reduces=(True, True, True, True)),
    Way("sum of 16, 16, 16 and 2 images / 50", sizes=UNEVEN, divide="by the number of images"),
)


def make_net() -> nn.Module:
    """Returns a network without batch norm, which would treat each micro-batch on its own, in 64 bits."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def images_of(rank: int, sizes: Iterable[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the micro-batches of a rank: images [size, 28, 28] and their classes."""
    rows = torch.arange(rank * sum(sizes), (rank + 1) * sum(sizes))
    return [(TRAIN.images[part].double() / 255, TRAIN.labels[part]) for part in rows.split(list(sizes))]


def gradient_of(net: nn.Module) -> torch.Tensor:
    """Returns the gradient as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def accumulate(way: Way, rank: int) -> tuple[torch.Tensor, int]:
    """Returns the gradient after all micro-batches, and the number of all-reduces."""
    model, reduced = DistributedDataParallel(make_net()), 0

    def count(group, bucket):
        nonlocal reduced
        reduced += 1
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, count)
    for (images, labels), reduces in zip(images_of(rank, way.sizes), way.reduces, strict=True):
        # DDP decides in the forward pass whether the backward pass reduces: both belong into `no_sync`.
        with nullcontext() if reduces else model.no_sync():
            if way.divide == "by the number of images":
                loss = F.cross_entropy(model(images), labels, reduction="sum") / sum(way.sizes)
            else:
                loss = F.cross_entropy(model(images), labels) / (1 if way.divide == "not" else len(way.sizes))
            loss.backward()
    return gradient_of(model), reduced


def compare(rank: Rank) -> None:
    """The work of each rank: compares each way with one batch of all images of all ranks."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    if rank.is_first:
        print(f"{'':38}{'all-reduces':>12}{'length':>10}{'error':>10}{'rank 1 - rank 0':>18}")
    for way in WRONG if "--bug" in sys.argv else RIGHT:
        found, reduced = accumulate(way, rank.rank)
        net = make_net()
        images, labels = (torch.cat(parts) for parts in zip(*images_of(0, [sum(way.sizes) * RANKS]), strict=True))
        F.cross_entropy(net(images), labels).backward()
        whole = gradient_of(net)
        both = [torch.empty_like(found) for _ in range(RANKS)]
        dist.all_gather(both, found)
        length, error, apart = (float(x.norm() / whole.norm()) for x in (found, found - whole, both[1] - both[0]))
        if rank.is_first:
            print(f"{way.name:38}{reduced:>12}{length:>10.3f}{error:>10.3f}{apart:>18.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        launch(compare, world_size=RANKS, max_restarts=0, logs=Path(folder))
