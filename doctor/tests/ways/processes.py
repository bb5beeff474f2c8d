"""python processes.py: multiprocessing.Process by hand, by default with the start method of the platform."""

import os
import sys
from multiprocessing import get_context

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import build, samples
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def init_process(rank, size, fn):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29612"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    fn(rank, size)
    dist.destroy_process_group()


def run(rank, size):
    torch.manual_seed(1234 + rank)
    data = samples()
    sampler = DistributedSampler(data, size, rank)
    loader = DataLoader(data, batch_size=int(16 / float(size)), sampler=sampler)
    net = DDP(build())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    size = 2
    context = get_context(sys.argv[1] if len(sys.argv) > 1 else None)
    processes = []
    for rank in range(size):
        p = context.Process(target=init_process, args=(rank, size, run))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
