"""A training that saves all that a resumed run needs."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    model = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = {name: value.clone() for name, value in net.state_dict().items()}
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            for name, value in net.state_dict().items():
                average[name].lerp_(value, 0.1)
        schedule.step()
        if dist.get_rank() == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save({**state, "schedule": schedule.state_dict(), "ema": average}, "last.pt")
        dist.barrier()
    dist.destroy_process_group()
