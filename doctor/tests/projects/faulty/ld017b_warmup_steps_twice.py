"""A warm-up that ends after N times fewer optimizer steps.

accelerate steps a prepared scheduler once per process. That is right if 20 steps are meant on one process, and wrong
if they are meant on N. Start: `torchrun --nproc-per-node 2 ld017b_warmup_steps_twice.py`.
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
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
    loader = DataLoader(make_dataset(96, seed=1), batch_size=8, shuffle=True)
    model, optimizer, loader, warmup = accelerator.prepare(model, optimizer, loader, warmup)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(F.binary_cross_entropy_with_logits(model(x), y))
            optimizer.step()
            warmup.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
