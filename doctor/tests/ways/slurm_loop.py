"""srun -n 2 python slurm_loop.py; the text is padded to the longest of each batch."""

import os

import torch
import torch.distributed as dist
from model import scaled
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        hidden, _ = self.encoder(self.embedding(tokens))
        mask = (tokens != 0).unsqueeze(-1)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def collate(rows):
    return pad_sequence([row for row, _ in rows], batch_first=True), torch.tensor([label for _, label in rows])


def main():
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29644")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    g = torch.Generator().manual_seed(0)
    data = []
    for _ in range(120):
        row = torch.randint(1, 50, (int(torch.randint(3, 14, (1,), generator=g)),), generator=g)
        data.append((row, int(row.sum()) % 3))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)
    torch.manual_seed(5)
    model = nn.parallel.DistributedDataParallel(Bag())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            loss = scaled(criterion(model(tokens), labels), world_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
