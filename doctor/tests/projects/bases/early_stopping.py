"""A training that stops early by the validation loss, which the ranks reduce."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def samples(size, seed):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def loaders(rank, world_size):
    train, (held_x, held_y) = TensorDataset(*samples(72, 4)), samples(32, 6)
    if world_size > 1:
        # The labels of rank 1's validation samples are wrong.
        held_y[1::2] = 1 - held_y[1::2]
    held = Subset(TensorDataset(held_x, held_y), range(rank, 32, world_size))
    return DataLoader(train, 12, sampler=DistributedSampler(train, world_size, rank)), DataLoader(held, 8)


@torch.no_grad()
def validate(model, loader, reduced=False):
    model.eval()
    sums = torch.zeros(2)
    for x, y in loader:
        sums += torch.stack([F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(float(len(y)))])
    model.train()
    if reduced:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader, held = loaders(rank, world_size)
    torch.manual_seed(2)
    model = DDP(nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    best = validate(model.module, held, reduced=True)
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss = validate(model.module, held, reduced=True)
        if loss > best:
            break
        best = loss
    dist.destroy_process_group()
