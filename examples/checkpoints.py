"""Checkpoints of several ranks with torch alone: one rank saves, all load; and what happens if a rank does not come.

    torchrun --standalone --nproc-per-node 2 examples/checkpoints.py checkpoint.pt

1. Rank 0 alone writes: all ranks have the same weights, and several writers would damage one file.
2. A barrier before the file is read: the other ranks would look for it before it is complete.
3. `map_location`: a tensor is loaded to the device it was saved from, so every rank would use GPU 0's memory.
4. A timeout: a rank waits for a lost one for 30 minutes by default. `monitored_barrier` (gloo) names the lost rank.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Saves on rank 0; every rank must call it, and finds the complete file afterwards."""
    if dist.get_rank() == 0:
        partial = path.with_suffix(".partial")
        # Of the bare network, whose keys have no "module." in front: it can be loaded without DDP.
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        partial.replace(path)  # a process that is killed before this line damages no checkpoint
    dist.barrier()


def load(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Loads to this rank's device; `weights_only` lets the file execute nothing."""
    saved = torch.load(path, map_location=device, weights_only=True)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])


def main(path: Path) -> tuple[bool, str]:
    """Saves, loads and waits in vain; returns whether the weights are rank 0's, and the timeout's message."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1)).to(device)
        return net, torch.optim.Adam(net.parameters())

    net, optimizer = build(seed=0)
    model = DistributedDataParallel(net)
    model(torch.randn(8, 10, device=device)).square().mean().backward()
    optimizer.step()
    save(path, net, optimizer)

    loaded, other = build(seed=1)
    load(path, loaded, other, device)
    equal = all(torch.equal(one, two) for one, two in zip(net.parameters(), loaded.parameters(), strict=True))
    print(f"rank {rank}: loaded to {device}, {'equal' if equal else 'other'} weights", flush=True)

    message = ""
    if rank != 1:  # rank 1 stands for a rank that hangs
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=1))
        except RuntimeError as error:
            message = str(error)
            print(f"rank {rank}: {message.splitlines()[0]}", flush=True)
    return equal, message


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo uses loopback
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
