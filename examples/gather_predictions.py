"""Predict on several ranks, and save all predictions in order on rank 0.

    torchrun --standalone --nproc-per-node 3 examples/gather_predictions.py predictions.pt

Processes share no memory: the predictions must be gathered. `DistributedSampler` repeats samples until all ranks have
equally many, and deals them out in turns, so that a plain concatenation has too many predictions in a wrong order. Here
each rank predicts a contiguous part, without padding. Only the gathered tensors are padded, and cut again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES = 101


def predict(net: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Returns logits, [samples of the loader, classes]; DDP is not needed where there is no gradient."""
    net.eval()
    with torch.inference_mode():
        return torch.cat([net(inputs) for (inputs,) in loader])


def gather_in_order(mine: torch.Tensor, count: int) -> torch.Tensor | None:
    """Returns the rows of all ranks, [count, ...], on rank 0, and None on the others.

    Args:
        mine: The rows of this rank: those from `count * rank // world_size` on.
        count: Number of rows of all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = [count * (each + 1) // world_size - count * each // world_size for each in range(world_size)]
    # All tensors of a collective must have one shape.
    padded = F.pad(mine, [0, 0] * (mine.dim() - 1) + [0, max(sizes) - len(mine)])
    parts = [torch.empty_like(padded) for _ in sizes] if rank == 0 else None
    dist.gather(padded, parts, dst=0)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]) if parts else None


def main(path: Path) -> None:
    """Predicts, gathers and saves; rank 0 compares with what one process predicts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    dataset = TensorDataset(torch.randn(SAMPLES, 20).double())

    part = range(SAMPLES * rank // world_size, SAMPLES * (rank + 1) // world_size)
    predictions = gather_in_order(predict(net, DataLoader(Subset(dataset, part), batch_size=16)), SAMPLES)

    sampler = DistributedSampler(dataset, shuffle=False)
    padded = predict(net, DataLoader(dataset, batch_size=16, sampler=sampler))
    naive = gather_in_order(padded, len(padded) * world_size)

    if predictions is not None and naive is not None:
        torch.save(predictions, path)
        expected = predict(net, DataLoader(dataset, batch_size=16))
        right = [float(torch.isclose(each[:SAMPLES], expected).all(dim=1).sum()) for each in (predictions, naive)]
        print(f"contiguous parts:   {len(predictions)} predictions of {SAMPLES} samples, {right[0]:.0f} in their place")
        print(f"DistributedSampler: {len(naive)} predictions of {SAMPLES} samples, {right[1]:.0f} in their place")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo uses loopback
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
