"""An IterableDataset that is split over ranks and workers, shuffled anew in each epoch."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class ShardedStream(IterableDataset):
    """Every worker of every rank reads its own records; the numbers of records are equal."""

    def __init__(self, size, rank, world_size):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = self.x[:, :4].argmax(1)
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for index in order[self.rank * workers + worker :: self.world_size * workers]:
            yield self.x[index], self.y[index]


def setup():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return rank, world_size


def main():
    rank, world_size = setup()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    stream = ShardedStream(128, rank, world_size)
    loader = DataLoader(stream, batch_size=8, num_workers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(2):
        stream.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
