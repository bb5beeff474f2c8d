"""Mixed precision on two ranks: what the scaler does, and in which order.

python -m examples.tutorial.precision --bug    float16 without a scaler, and clipping before unscaling
python -m examples.tutorial.precision          with a scaler, in order, also if a loss overflows on one rank
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_mnist.data.dataset import load_dataset
from lit_mnist.data.digits.split import normalize
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

RANKS, SHARE, STEPS, OUTLIER = 2, 256, 80, 40
TRAIN = load_dataset().train


@dataclass
class Way:
    """A way to train in 16 bits, or in 32."""

    name: str
    dtype: torch.dtype = torch.float16
    scales: bool = True
    unscales_first: bool = True
    has_outlier: bool = False


WRONG = (
    Way("float32", dtype=torch.float32, scales=False),
    Way("float16 without a scaler", scales=False),
    Way("float16, clipped before unscale_", unscales_first=False),
)
RIGHT = (
    Way("float16, clipped after unscale_"),
    Way("the same, overflow on rank 1", has_outlier=True),
    Way("bfloat16 without a scaler", dtype=torch.bfloat16, scales=False),
)


def train(rank: Rank, way: Way) -> tuple[float, float, float, int, float]:
    """Trains; returns the share of zeros, norm and loss of the last step, the skipped steps, and the scale."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=way.scales)
    # A rank trains on the same images in each step: soon the network is sure of them, and its gradient is small.
    rows = slice(rank.rank * SHARE, (rank.rank + 1) * SHARE)
    images, labels = normalize(TRAIN.images[rows].float()), TRAIN.labels[rows]
    skipped = 0
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=way.dtype, enabled=way.dtype != torch.float32):
            logits = model(images)
        logits.retain_grad()
        loss = F.cross_entropy(logits.float(), labels)
        if way.has_outlier and step == OUTLIER and rank.rank == 1:
            loss = loss * 1e6
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if way.unscales_first:
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        # Skips the step if a gradient is not finite. DDP has averaged the gradients, so all ranks see the same.
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
    zeros = float((logits.grad == 0).double().mean())
    return zeros, norm.item(), loss.item(), skipped, scaler.get_scale()


def work(rank: Rank) -> None:
    """The work of each rank."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    if rank.is_first:
        print(f"{'':34}{'zeros':>8}{'norm':>12}{'loss':>8}{'skipped':>12}{'scale':>16}")
    for way in WRONG if "--bug" in sys.argv else RIGHT:
        found = torch.tensor(train(rank, way), dtype=torch.float64)
        both = [torch.zeros_like(found) for _ in range(RANKS)]
        dist.all_gather(both, found)
        zeros, norm, loss = both[0][:3].tolist()
        skipped, scale = (" and ".join(f"{float(own[column]):.0f}" for own in both) for column in (3, 4))
        if rank.is_first:
            print(f"{way.name:34}{zeros:>8.1%}{norm:>12.3f}{loss:>8.3f}{skipped:>12}{scale:>16}")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        launch(work, world_size=RANKS, max_restarts=0, logs=Path(folder))
