"""A decay that ends N times too early.

accelerate steps a prepared scheduler once per process, but the decay is as long as the prepared loader, which is
already N times shorter: the second half of the training has a learning rate of almost zero.
Start: `torchrun --nproc-per-node 2 ld017_scheduler_steps_twice.py`.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 16, generator=generator)
    return TensorDataset(x, (x[:, :6].sum(1) > 0).float())


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_dataset(96, seed=1), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    epochs = 2
    decay = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.01, total_iters=epochs * len(loader)
    )
    decay = accelerator.prepare(decay)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.binary_cross_entropy_with_logits(model(x), y))
            optimizer.step()
            decay.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
