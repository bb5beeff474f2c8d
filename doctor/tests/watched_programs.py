"""A training loop of a stranger that trains 500 steps, with a fault that begins in the middle if its name is given."""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BEGIN = 240


def main(fault: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = torch.randn(2000, 20)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data)
    workers = int(os.environ.get("WORKERS", "0"))
    shared = fault == "samples"
    loader = DataLoader(data, 20, shuffle=shared, sampler=None if shared else sampler, num_workers=workers)
    torch.manual_seed(rank)
    step = epoch = 0
    while step < steps:
        if fault != "order":
            sampler.set_epoch(epoch)
        epoch += 1
        if fault != "mode" or step < BEGIN:
            model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if step >= BEGIN:
                disturb(fault, step, rank, net, optimizer)
            optimizer.step()
            step += 1
            if step == steps:
                break
        # Every rank validates on the whole set, which is slow, but no fault.
        with torch.no_grad():
            model.eval()
            for x, _ in DataLoader(data, 200):
                model(x)
    if rank == 0:
        print("weights", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
    dist.destroy_process_group()


def disturb(fault: str, step: int, rank: int, net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    if fault == "weights" and step == BEGIN and rank == 1:
        net[0].weight.grad.mul_(1.001)
    if fault == "lr" and step == BEGIN and rank == 1:
        optimizer.param_groups[0]["lr"] *= 2


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
