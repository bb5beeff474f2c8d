"""Starts a rank per GPU, and forgets to set the epoch of the sampler."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(rank, world_size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29763"))
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(dataset, 8, sampler=DistributedSampler(dataset), pin_memory=True)
    model = DistributedDataParallel(nn.Linear(6, 1).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs.to(rank)), targets.to(rank)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
