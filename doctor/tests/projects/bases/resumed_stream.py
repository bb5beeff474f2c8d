"""A recurrent network on windows of a text, of which each rank reads its own half; inputs get noise."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def of_all_ranks(value):
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return found


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    text = torch.randn(dist.get_world_size() * 4, 400, 3)
    net = nn.GRU(3, 6, batch_first=True)
    model = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    rank = dist.get_rank()
    torch.manual_seed(10 + rank)
    step, first, hidden = 0, 4 * rank, torch.zeros(1, 4, 6)
    if os.path.exists("stream.pt"):
        saved = torch.load("stream.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        hidden = saved["hidden"][rank]
        torch.set_rng_state(saved["generator"][rank])
    while step < 32:
        begin, rows = 8 * step, text[first : first + 4]
        x, y = rows[:, begin : begin + 8], rows[:, begin + 1 : begin + 9]
        found, hidden = model(x + 0.1 * torch.randn(x.shape), hidden)
        optimizer.zero_grad()
        F.mse_loss(found[..., :3], y).backward()
        optimizer.step()
        step, hidden = step + 1, hidden.detach()
        if step % 4 == 0:
            kept = {"hidden": of_all_ranks(hidden), "generator": of_all_ranks(torch.get_rng_state())}
            if rank == 0:
                usual = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**usual, **kept}, "stream.pt")
            dist.barrier()
    dist.destroy_process_group()
