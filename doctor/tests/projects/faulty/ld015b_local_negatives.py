"""A contrastive loss with the negatives of one rank.

Two ranks with 8 pairs have 7 negatives per anchor; one process with 16 pairs has 15. The embeddings are not gathered.
Start: `torchrun --nproc-per-node 2 ld015b_local_negatives.py`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_pairs(size):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 16, generator=generator)
    return TensorDataset(x, x + 0.2 * torch.randn(size, 16, generator=generator))


def info_nce(a, b, temperature=0.1):
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(a)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
    pairs = make_pairs(96)
    sampler = DistributedSampler(pairs)
    loader = DataLoader(pairs, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            za, zb = model(torch.cat([a, b])).chunk(2)
            info_nce(za, zb).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
