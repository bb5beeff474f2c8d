"""torchrun --nproc_per_node=2 fetched_ahead.py: the loader ends before the last batch is used, as Accelerate's does."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import build, samples, scaled
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def fetched_ahead(loader):
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


def main():
    dist.init_process_group("gloo")
    data = samples(64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    net = DDP(nn.Sequential(build(), nn.Dropout(0.2)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(fetched_ahead(loader)):
            scaled(F.cross_entropy(net(x), y) / 2, dist.get_world_size()).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
