"""A small transformer, trained with DistributedDataParallel."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tokens(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(24, 2, 48, dropout, batch_first=True) for _ in range(2))
        self.out = nn.Linear(24, 50)
        self.register_buffer("position", torch.arange(12).float()[:, None] / 12)
        self.checkpointed = False

    def forward(self, x):
        h = self.embed(x) + self.position
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    tokens = torch.randint(0, 50, (96, 13), generator=torch.Generator().manual_seed(5))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    sampler = DistributedSampler(data, world_size, rank, seed=3)
    loader = DataLoader(data, 4, sampler=sampler)
    net = Tokens()
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    dist.destroy_process_group()
