"""A stream that is split over the ranks, but not over the workers.

Each of a rank's two workers reads all samples of the rank, so each sample comes twice in an epoch.
Start: `torchrun --nproc-per-node 2 ld003b_workers_duplicated.py`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Records(IterableDataset):
    """Reads every n-th record, in an order that differs per epoch."""

    def __init__(self, size, rank, world_size):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = self.x[:, :4].argmax(1)
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch))
        for index in order[self.rank :: self.world_size].tolist():
            yield self.x[index], self.y[index]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    records = Records(96, rank, world_size)
    loader = DataLoader(records, batch_size=8, num_workers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        records.epoch = epoch
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
