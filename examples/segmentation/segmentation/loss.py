"""The loss over the valid pixels of all ranks, and the curve of the learning rate."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchmetrics import Metric

from segmentation.images import IGNORED

Schedule = Literal["constant", "onecycle", "polynomial"]
_ONECYCLE_START = 1 / 25
_ONECYCLE_END = 1e-3
_POWER = 0.9


def pixel_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's loss, whose mean over the ranks is the mean over the valid pixels of all ranks.

    Ranks have the same number of images, but not of valid pixels. Therefore, the sum over the pixels is divided by the
    count of all ranks, and multiplied by the number of ranks, because DDP averages the gradients.

    Args:
        logits: Floating point [batch, classes, height, width].
        targets: Classes, int64 [batch, height, width]; pixels of class `IGNORED` do not count.

    Returns:
        The loss to minimize, in nats, and the mean over the valid pixels of all ranks, for the log. Both are scalars,
        and 0 with zero gradients if no rank has a valid pixel.
    """
    total = sum_over_pixels(logits, targets)
    sums = torch.stack([(targets != IGNORED).sum().double(), total.detach().double()])
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size > 1:
        dist.all_reduce(sums)
    count = sums[0].clamp(min=1)
    return total * (world_size / count.to(total.dtype)), (sums[1] / count).float()


def sum_over_pixels(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the cross-entropies of the valid pixels; see `pixel_loss`."""
    # 16-bit kernels on GPUs round differently.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


class MeanPixelLoss(Metric):
    """The mean cross-entropy of the valid pixels of all ranks, in nats; 0 if there is none."""

    full_state_update = False
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        # The sum of the cross-entropies, and the number of pixels. The order of additions does not affect double sums.
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds a batch; see `pixel_loss`."""
        self.sums += torch.stack([sum_over_pixels(logits, targets).double(), (targets != IGNORED).sum().double()])

    def compute(self) -> torch.Tensor:
        """Returns the mean, a scalar."""
        return self.sums[0] / self.sums[1].clamp(min=1)


def lr_factor(schedule: Schedule, warmup: float | None, step: int, total_steps: int) -> float:
    """Returns the learning rate of an optimizer step as a fraction of the peak.

    `onecycle` rises linearly from 1/25 of the peak, and then falls linearly to 1/1000 (Smith and Topin:
    Super-Convergence, 2018). `polynomial` falls as a power of the remaining steps (Chen et al.: DeepLab, 2017).

    Args:
        schedule: The schedule.
        warmup: Share of the steps in which the learning rate rises linearly; None for 0.25 (`onecycle`) or 0.
        step: The optimizer step, from 0. Later steps than the last have the learning rate of the last.
        total_steps: Optimizer steps in the run.
    """
    if warmup is None:
        warmup = 0.25 if schedule == "onecycle" else 0.0
    rising = round(warmup * total_steps)
    start = _ONECYCLE_START if schedule == "onecycle" else 0.0
    if step < rising:
        return start + (1 - start) * (step + 1) / rising
    if schedule == "constant":
        return 1.0
    falling = total_steps - rising
    done = min(step - rising, max(falling - 1, 0)) / max(falling, 1)
    return 1 + (_ONECYCLE_END - 1) * done if schedule == "onecycle" else (1 - done) ** _POWER
