"""python gpu_tokens.py: a rank per GPU, batches drawn on the GPU, and dropout there."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model import scaled
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29677"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def main(rank, world_size, total_steps):
    setup(rank, world_size)
    table = torch.arange(600, device=rank).float().sin()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 1)).to(rank)
    net = DDP(net, device_ids=[rank])
    torch.cuda.manual_seed(rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for _ in range(total_steps):
        begin = torch.randint(0, 590, (16,), device=rank)
        rows = table[begin[:, None] + torch.arange(10, device=rank)]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            predicted = net(rows[:, :9])
            loss = nn.functional.mse_loss(predicted.float(), rows[:, 9:])
        optimizer.zero_grad(set_to_none=True)
        scaled(loss, world_size).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(main, args=(world_size, int(sys.argv[1]) if len(sys.argv) > 1 else 5000), nprocs=world_size)
