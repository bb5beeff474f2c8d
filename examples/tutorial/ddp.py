"""Two ranks train with DDP. Do they train what one process trains?

python -m examples.tutorial.ddp --bug    the forward pass bypasses the wrapper
python -m examples.tutorial.ddp          the forward pass goes through it
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
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

RANKS, BATCH, STEPS = 2, 64, 50
SHARE = BATCH // RANKS
DATA = load_dataset().train


def make_net() -> nn.Sequential:
    """Returns a network with the same initial weights on all ranks, in 64 bits."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)).double()


def step(forward: nn.Module, optimizer: torch.optim.Optimizer, first: int, samples: int) -> None:
    """Takes an optimizer step with the mean loss over consecutive samples."""
    images = DATA.images[first : first + samples].double() / 255
    optimizer.zero_grad()
    F.cross_entropy(forward(images), DATA.labels[first : first + samples]).backward()
    optimizer.step()


def difference(net: nn.Module, other: list[torch.Tensor]) -> float:
    """Returns the largest difference between the parameters of a network and those of another."""
    pairs = zip(net.state_dict().values(), other, strict=True)
    return max(float((mine - its).abs().max()) for mine, its in pairs)


def train(rank: Rank) -> None:
    """The work of each rank."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    net = make_net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # `model.module` is `net`: it computes the same loss, but DDP does not see that it was called.
    forward = model.module if "--bug" in sys.argv else model
    for number in range(STEPS):
        step(forward, optimizer, first=number * BATCH + rank.rank * SHARE, samples=SHARE)

    # Each rank receives the weights of rank 0. Rank 1 compares them with its own, rank 0 with those of one process.
    weights = [tensor.clone() for tensor in net.state_dict().values()]
    for tensor in weights:
        dist.broadcast(tensor, src=0)
    between = torch.tensor(difference(net, weights))
    dist.all_reduce(between, op=dist.ReduceOp.MAX)
    if rank.is_first:
        print(f"rank 1 differs from rank 0 by {between:.3f}")
        for name, samples in (("the whole batches", BATCH), ("its own half of each batch", SHARE)):
            alone = make_net()
            sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
            for number in range(STEPS):
                step(alone, sgd, first=number * BATCH, samples=samples)
            print(f"rank 0 differs from one process that trains on {name} by {difference(alone, weights):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        launch(train, world_size=RANKS, max_restarts=0, logs=Path(folder))
