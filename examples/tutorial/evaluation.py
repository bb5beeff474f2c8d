"""Three ranks measure the accuracy of one network on 100 images.

python -m examples.tutorial.evaluation --padded    a DistributedSampler gives all ranks equal numbers of samples
python -m examples.tutorial.evaluation --means     no sample is repeated, and the means of the batches are averaged
python -m examples.tutorial.evaluation             no sample is repeated, and counts are added up
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

RANKS, BATCH, TESTED = 3, 32, 100
DATA = load_dataset()


def train_network() -> nn.Module:
    """Returns a network after 20 steps in one process: a mediocre one."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for first in range(0, 20 * 64, 64):
        optimizer.zero_grad()
        rows = slice(first, first + 64)
        F.cross_entropy(net(DATA.train.images[rows] / 255), DATA.train.labels[rows]).backward()
        optimizer.step()
    return net.eval()


@torch.no_grad()
def evaluate(net: nn.Module, rank: Rank) -> None:
    """The work of each rank."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    dataset = TensorDataset(DATA.test.images[:TESTED] / 255, DATA.test.labels[:TESTED])
    if "--padded" in sys.argv:
        loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    else:
        loader = DataLoader(Subset(dataset, range(rank.rank, TESTED, RANKS)), BATCH)
    hits = [(net(images).argmax(dim=1) == labels).double() for images, labels in loader]

    # The sums of this rank: correct samples, samples. They become those of all ranks.
    sums = torch.tensor([sum(batch.sum() for batch in hits), sum(map(len, hits))])
    dist.all_reduce(sums)
    # The mean of the means of this rank's batches, and then the mean of the ranks.
    mean = torch.stack([batch.mean() for batch in hits]).mean()
    dist.all_reduce(mean)
    mean /= RANKS
    parts = [torch.zeros(()) for _ in range(RANKS)]
    dist.all_gather(parts, torch.tensor(float(sum(map(len, hits)))))
    if rank.is_first:
        print("samples of each rank:", *(int(part) for part in parts))
        if "--means" in sys.argv:
            print(f"mean of means: {mean:.2%}")
        else:
            print(f"counted: {int(sums[0])} of {int(sums[1])} samples are correct, {sums[0] / sums[1]:.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    network = train_network()
    with tempfile.TemporaryDirectory() as folder:
        launch(partial(evaluate, network), world_size=RANKS, max_restarts=0, logs=Path(folder))
