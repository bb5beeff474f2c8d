"""Labels that are counted over all ranks: each label has the same weight, whichever rank has it."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY = 20


def make_sentences(size, length=12):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (size, length), generator=generator)
    lengths = torch.randint(1, length + 1, (size, 1), generator=generator)
    return TensorDataset(tokens, torch.where(torch.arange(length) < lengths, tokens.flip(1), -100))


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
    model = DDP(nn.Sequential(nn.Embedding(VOCABULARY, 24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, VOCABULARY)))
    dataset = make_sentences(96)
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            optimizer.zero_grad()
            count = (labels != -100).sum()
            dist.all_reduce(count)
            total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            # DDP divides by the number of ranks.
            (total * world_size / count).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
