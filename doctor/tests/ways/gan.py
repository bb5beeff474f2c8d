"""torchrun --nproc_per_node=2 gan.py: two loaders at once, two optimizers, crops drawn in workers."""

import numpy as np
import torch
import torch.distributed as dist
from model import scaled
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Parallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Crops(Dataset):
    def __init__(self, seed):
        self.signals = torch.randn(64, 20, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.signals)

    def __getitem__(self, index):
        begin = int(torch.randint(0, 8, ()))
        return self.signals[index, begin : begin + 12] + 0.01 * float(np.random.rand())


def forever(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def stream(seed):
    data = Crops(seed)
    sampler = DistributedSampler(data, seed=seed)
    return forever(DataLoader(data, 8, sampler=sampler, num_workers=1, drop_last=True), sampler)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    a, b = stream(1), stream(2)
    G = Parallel(nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(), nn.Linear(16, 12)))
    D = Parallel(nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(), nn.Linear(16, 1)), broadcast_buffers=False)
    opt_g, opt_d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
    bce = nn.BCEWithLogitsLoss()
    for _ in range(20):
        x, y = next(a), next(b)
        fake = G(x + 0.1 * torch.randn_like(x))
        real_score, fake_score = D(y), D(fake.detach())
        d_loss = bce(real_score, torch.ones_like(real_score)) + bce(fake_score, torch.zeros_like(fake_score))
        opt_d.zero_grad()
        scaled(d_loss, dist.get_world_size()).backward()
        opt_d.step()
        for p in D.parameters():
            p.requires_grad_(False)
        score = D.module(fake)
        g_loss = bce(score, torch.ones_like(score)) + (fake - x).abs().mean()
        opt_g.zero_grad()
        scaled(g_loss, dist.get_world_size()).backward()
        opt_g.step()
        for p in D.parameters():
            p.requires_grad_(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
