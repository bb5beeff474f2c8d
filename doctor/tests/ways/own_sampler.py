"""torchrun --nproc_per_node=2 own_sampler.py: a batch sampler that knows the ranks, mixup, accumulation by no_sync."""

from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import build, samples, scaled
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class DistributedBatchSampler:
    def __init__(self, size, batch):
        self.size, self.batch, self.epoch = size, batch, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.RandomState(self.epoch).permutation(self.size)
        world, rank = dist.get_world_size(), dist.get_rank()
        for begin in range(0, self.size - world * self.batch + 1, world * self.batch):
            yield order[begin + rank * self.batch : begin + (rank + 1) * self.batch].tolist()

    def __len__(self):
        return self.size // (self.batch * dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    np.random.seed(dist.get_rank())
    torch.manual_seed(100 + dist.get_rank())
    data = samples(128)
    sampler = DistributedBatchSampler(len(data), 8)
    loader = DataLoader(data, batch_sampler=sampler)
    net = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            last = number % 2 == 1
            with nullcontext() if last else net.no_sync():
                lam = np.random.beta(0.4, 0.4)
                other = torch.randperm(len(x))
                out = net(lam * x + (1 - lam) * x[other])
                loss = (lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[other])) / 2
                scaled(loss, dist.get_world_size()).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
