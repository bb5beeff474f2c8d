"""python spawned.py --world-size 2, or by `fixed` with a constant, by `gpus` with the number of GPUs."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from model import build, samples
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

NUM_PROCS = 2


def worker(rank, args):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29611"
    dist.init_process_group("gloo", rank=rank, world_size=args.world_size)
    data = samples()
    sampler = DistributedSampler(data, num_replicas=args.world_size, rank=rank)
    loader = DataLoader(data, batch_size=16 // args.world_size, sampler=sampler)
    net = build()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    if not args.by_hand:
        net = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            if args.by_hand:
                for p in net.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= NUM_PROCS
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=0)
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--start", choices=["argument", "fixed", "gpus"], default="argument")
    args = parser.parse_args()
    if args.start == "fixed":
        args.world_size = NUM_PROCS
    elif args.start == "gpus":
        args.world_size = torch.cuda.device_count()
    mp.spawn(worker, args=(args,), nprocs=args.world_size, join=True)
