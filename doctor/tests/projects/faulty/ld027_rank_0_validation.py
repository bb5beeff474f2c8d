"""A validation on rank 0 through the wrapped model.

DDP broadcasts the buffers in each forward pass, also in evaluation. Only rank 0 takes part, so its collectives pair up
with other ones of rank 1, which has begun the next epoch.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((16,), 0.1))
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x - self.mean)


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=15))
    torch.manual_seed(0)
    model = DDP(Normalized())
    dataset = make_dataset(96, seed=1)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    val_loader = DataLoader(make_dataset(32, seed=2), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                correct = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
            print(f"epoch {epoch}: accuracy {correct / 32:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
