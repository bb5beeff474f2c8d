"""A mean over micro-batches that have unequal numbers of labels.

Each micro-batch is divided by its own number of labels and by the number of micro-batches, so its labels count for
more if it has fewer of them. DDP does the same over the ranks.
"""

import contextlib
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
    labels = torch.where(torch.arange(length) < lengths, tokens.flip(1), -100)
    return TensorDataset(tokens, labels)


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
    dataset = make_sentences(72)
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    micro_batches = 3
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (tokens, labels) in enumerate(loader):
            last = (i + 1) % micro_batches == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
                (loss / micro_batches).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
