"""A GAN in a plain loop: each network is wrapped by itself, and the ranks draw different latent vectors."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16)))
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    torch.manual_seed(1000 + rank)
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(0)).cumsum(1) / 4
    dataset = TensorDataset(x)
    sampler = DistributedSampler(dataset, world_size, rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in DataLoader(dataset, batch_size=8, sampler=sampler):
            fake = generator(torch.randn(len(real), 4))

            critic.requires_grad_(True)
            optimizer_d.zero_grad()
            scores = critic(torch.cat([real, fake.detach()]))
            loss_d = F.softplus(-scores[: len(real)]).mean() + F.softplus(scores[len(real) :]).mean()
            loss_d.backward()
            optimizer_d.step()

            critic.requires_grad_(False)
            optimizer_g.zero_grad()
            loss_g = F.softplus(-critic.module(fake)).mean()
            loss_g.backward()
            optimizer_g.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
