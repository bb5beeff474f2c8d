"""An endless stream that each rank and worker draws from its own seed."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Tokens(IterableDataset):
    def __init__(self, length):
        self.length = length
        self.data = torch.arange(4000) * 7919 % 61

    def __iter__(self):
        info = get_worker_info()
        seed = 42 + (info.id if info else 0) + 1337 * dist.get_rank()
        rng = random.Random(seed)
        while True:
            positions = list(range(len(self.data) // self.length - 1))
            rng.shuffle(positions)
            for position in positions:
                chunk = self.data[position * self.length : (position + 1) * self.length + 1]
                yield chunk[:-1], chunk[1:]


def batches(size):
    for x, y in DataLoader(Tokens(16), batch_size=size, pin_memory=False, num_workers=0):
        yield x.to("cpu", non_blocking=True), y.to("cpu", non_blocking=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.out = nn.Linear(16, 61, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(16, 16).tril())
        self.last_loss = None

    def forward(self, x, targets):
        h = self.mask @ self.embed(x) / self.mask.sum(1, keepdim=True)
        logits = self.out(F.dropout(h, 0.1, self.training))
        self.last_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits


accumulation = 4
dist.init_process_group("gloo")
world_size = dist.get_world_size()
assert accumulation % world_size == 0
accumulation //= world_size
torch.manual_seed(1337 + dist.get_rank())
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
train_iter = batches(4)
X, Y = next(train_iter)
for iteration in range(100_000):
    for group in optimizer.param_groups:
        group["lr"] = 5e-4 * min(1.0, (iteration + 1) / 10)
    for micro in range(accumulation):
        model.require_backward_grad_sync = micro == accumulation - 1
        model(X, Y)
        loss = model.module.last_loss / accumulation
        X, Y = next(train_iter)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
