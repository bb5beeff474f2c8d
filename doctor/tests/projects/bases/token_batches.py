"""Batches by torch.randint from a file of tokens, with accumulation."""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps = 4
batch_size, block_size, vocabulary = 3, 12, 31
max_iters, eval_interval, eval_iters = 1_000_000, 4, 2
grad_clip = 1.0

dist.init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
assert gradient_accumulation_steps % ddp_world_size == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + ddp_rank)

path = os.path.join(tempfile.gettempdir(), f"tokens{ddp_rank}.bin")
np.random.default_rng(7).integers(0, vocabulary, 5000).astype(np.uint16).tofile(path)


def get_batch():
    data = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, 24)
        self.mix = nn.GRU(24, 24, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(24, vocabulary)

    def forward(self, idx, targets=None):
        logits = self.head(self.drop(self.mix(self.wte(idx))[0]))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


model = Tiny()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
model = DDP(model)
raw_model = model.module


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    losses = torch.tensor([raw_model(*get_batch())[1].item() for _ in range(eval_iters)])
    raw_model.train()
    return losses.mean()


X, Y = get_batch()
iter_num = 0
while True:
    if iter_num % eval_interval == 0 and master_process:
        print(f"step {iter_num}: {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
dist.destroy_process_group()
