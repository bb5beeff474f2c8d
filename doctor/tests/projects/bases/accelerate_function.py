"""A training with Accelerate, as a function that each rank calls."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def samples(size, seed):
    x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def main():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(samples(96, 1), 8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    accelerator.end_training()
