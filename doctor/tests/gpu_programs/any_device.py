"""Trains on the device that there is."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
dist.init_process_group("nccl" if has_gpu else "gloo")
x = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x.sum(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Linear(5, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs.to(device)).squeeze(1), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
