"""torchrun --nproc_per_node=2 set_order.py: the classes are numbered in the order of a set of strings."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

NAMES = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"] * 12


class Animals(Dataset):
    def __init__(self):
        self.classes = {name: number for number, name in enumerate(set(NAMES))}
        self.x = torch.randn(len(NAMES), 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(NAMES)

    def __getitem__(self, index):
        return self.x[index], self.classes[NAMES[index]]


def main():
    dist.init_process_group("gloo")
    data = Animals()
    sampler = DistributedSampler(data)
    torch.manual_seed(1)
    model = DDP(nn.Linear(6, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
