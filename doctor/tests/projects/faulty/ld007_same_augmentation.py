"""Workers that begin each epoch with the same seed.

`worker_init_fn` seeds NumPy with a number that does not depend on the epoch, and new workers start in each epoch: a
sample gets the same noise in every epoch. The windows are read in the order of time.
"""

import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class NoisyWindows(Dataset):
    """Windows of a signal with noise of the given strength."""

    def __init__(self, size, strength=0.2):
        generator = torch.Generator().manual_seed(1)
        self.signal = torch.randn(size + 16, generator=generator).cumsum(0) / 4
        self.size = size
        self.strength = strength

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        window = self.signal[index : index + 16]
        noise = torch.from_numpy(np.random.randn(16).astype("float32"))
        return window + self.strength * noise, self.signal[index + 16 : index + 17]


def seed_worker(worker_id):
    np.random.seed(1234 + 100 * int(os.environ.get("RANK", "0")) + worker_id)


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
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    dataset = NoisyWindows(96)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=False)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for window, target in loader:
            optimizer.zero_grad()
            F.mse_loss(model(window), target).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
