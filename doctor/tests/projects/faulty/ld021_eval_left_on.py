"""Evaluation mode that is left on.

The evaluation calls `eval()`, and nothing calls `train()` afterwards: from the second epoch on the model trains without
dropout.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def setup():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return rank, world_size


@torch.no_grad()
def evaluate(model, dataset, rank, world_size):
    """Returns the accuracy over all samples, each counted once."""
    model.eval()
    mine = torch.utils.data.Subset(dataset, range(rank, len(dataset), world_size))
    counts = torch.zeros(2)
    for x, y in DataLoader(mine, batch_size=16):
        counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    rank, world_size = setup()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)))
    torch.manual_seed(1000 + rank)
    dataset = make_dataset(96, seed=1)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    val_set = make_dataset(32, seed=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model, val_set, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
