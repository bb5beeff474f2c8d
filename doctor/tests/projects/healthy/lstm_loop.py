"""An LSTM with recurrent dropout in a loop with RMSprop, a schedule per step and checkpoints of rank 0."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Forecaster(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.lstm = nn.LSTM(1, width, num_layers=2, dropout=0.2, batch_first=True)
        self.output = nn.Linear(width, 1)

    def forward(self, series):
        states, _ = self.lstm(series)
        return self.output(states[:, -1])


def make_series(size):
    phase = torch.rand(size, 1, generator=torch.Generator().manual_seed(1)) * 6.28
    values = torch.sin(torch.arange(17) / 2 + phase)
    return TensorDataset(values[:, :16, None], values[:, 16:])


def main(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(Forecaster())
    torch.manual_seed(1000 + rank)
    dataset = make_series(96)
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total, seen = 0.0, 0
        for series, target in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(series), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(series)
            seen += len(series)
        if rank == 0:
            print(f"epoch {epoch}: loss on rank 0 {total / seen:.4f}")
            torch.save(model.module.state_dict(), "forecaster.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(0, 1)
