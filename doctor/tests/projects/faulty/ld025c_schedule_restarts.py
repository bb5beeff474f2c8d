"""A program that resumes by itself: the checkpoint has the epoch, but the schedule begins again."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = Path("last.pt")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    first = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    for epoch in range(first, 4):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
        if dist.get_rank() == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, CHECKPOINT)
        dist.barrier()
    dist.destroy_process_group()
