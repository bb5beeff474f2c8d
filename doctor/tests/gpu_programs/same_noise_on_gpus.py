"""Trains a denoiser, whose noise is drawn on the GPU from one seed on all ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(123)
dataset = TensorDataset(torch.randn(128, 16))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(local_rank)
ddp = DistributedDataParallel(model, device_ids=[local_rank])
optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        clean = batch[0].to(local_rank)
        noise = torch.randn(clean.shape, device="cuda")
        loss = (ddp(clean + noise) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
