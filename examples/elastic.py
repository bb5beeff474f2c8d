"""Elastic restart with torch alone: a rank dies, torchrun starts all again, and the weights end as if nothing happened.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py

torchrun notices the lost rank, ends the others, and starts the script again, without any state. The script continues
from its last checkpoint, which must hold all that a step changes: here weights, momentum and the step. In step 30, rank
1 kills itself once. At the end, the script trains without interruption, and compares.

Without the variable, the restarted ranks read the addresses of the ended ones from the store that torchrun keeps, and
wait for them until the timeout: https://github.com/pytorch/pytorch/issues/135712, seen with torch 2.15.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY, KILLED_IN = 50, 20, 30
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def train(path: Path | None) -> torch.Tensor:
    """Trains, from the checkpoint if there is one, and returns the weights; without a path, nothing interrupts it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    first = 0
    if path and path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        if dist.get_rank() == 0:
            print(f"restart {RESTARTS}: continues after step {first}", flush=True)
    for step in range(first, STEPS):
        # The samples are a function of the step: there is no position in the data to restore.
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        inputs = torch.randn(32, 20, generator=generator)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if path and RESTARTS == 0 and dist.get_rank() == 1 and step == KILLED_IN:
            print(f"rank 1 kills itself in step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if path and dist.get_rank() == 0 and (step + 1) % SAVE_EVERY == 0:
            partial = path.with_suffix(".partial")
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, partial)
            partial.replace(path)  # a kill before this line leaves the last checkpoint, and after it the new one
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def main() -> None:
    """Trains with the interruption and without it, and compares the weights."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo uses loopback
    dist.init_process_group("gloo")
    path = Path(f"elastic-{os.environ['TORCHELASTIC_RUN_ID']}.pt")
    resumed, uninterrupted = train(path), train(None)
    if dist.get_rank() == 0:
        path.unlink()
        print("bit-identical weights" if torch.equal(resumed, uninterrupted) else "the weights differ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
