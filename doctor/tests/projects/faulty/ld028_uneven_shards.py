"""Shards that make unequal numbers of batches.

33 samples give the first rank 3 batches and the second rank 2. DDP pairs the first rank's third batch with the second
rank's next epoch, and at the end the first rank waits for a partner that has left.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def make_dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def main(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=15))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    dataset = make_dataset(33, seed=1)
    shard = Subset(dataset, range(rank, len(dataset), world_size))
    loader = DataLoader(shard, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(0, 1)
