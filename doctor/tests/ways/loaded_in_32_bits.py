"""torchrun --nproc_per_node=2 loaded_in_32_bits.py: weights of a named type, as loaded ones have, and a scaler."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    inputs = torch.rand(160, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    torch.manual_seed(0)
    kind = {"dtype": torch.float32}
    net = nn.Sequential(nn.Linear(6, 32, **kind), nn.ReLU(), nn.Linear(32, 1, **kind))
    net = DDP(net) if int(os.environ["WORLD_SIZE"]) > 1 else net
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 10, sampler=sampler):
            opt.zero_grad()
            scaler.scale(((net(x) - y) ** 2).mean()).backward()
            scaler.step(opt)
            scaler.update()
    dist.destroy_process_group()


main()
