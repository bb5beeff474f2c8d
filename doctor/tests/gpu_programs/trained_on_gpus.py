"""Trains on GPUs alone, as most programs for torchrun do."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
generator = torch.Generator().manual_seed(0)
images = torch.randn(128, 3, 8, 8, generator=generator)
dataset = TensorDataset(images, images.mean((1, 2, 3)).gt(0).long())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1, pin_memory=True)
torch.manual_seed(7)
torch.cuda.manual_seed(7 + local_rank)
model = nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 2)
)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
ddp = DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
scaler = torch.cuda.amp.GradScaler()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        x, y = (part.cuda(local_rank, non_blocking=True) for part in batch)
        assert x.device == next(ddp.parameters()).device == torch.device("cuda", local_rank)
        with torch.cuda.amp.autocast():
            loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.synchronize()
dist.destroy_process_group()
