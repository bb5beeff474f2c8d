"""The loss of both tasks: the mean cross-entropy over the samples or over the pixels with a class."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lit_mnist.data.dataset import IGNORED


def mean_loss(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Returns this rank's loss, whose mean over the ranks is the mean over the samples or pixels of all ranks.

    Ranks have the same number of images, but not of pixels with a class. Therefore, the sum over the pixels is divided
    by the count of all ranks, and multiplied by the number of ranks, because DDP averages the gradients. Segmentation
    needs one collective for the count.

    Args:
        logits: Floating point [batch, classes] or [batch, classes, height, width].
        targets: Classes, int64 [batch] or [batch, height, width]; pixels of class `IGNORED` are left out.
        label_smoothing: Share of the target probability that is spread over all classes.

    Returns:
        A scalar in nats; 0 with zero gradients if no rank has a pixel with a class.
    """
    # Only some engines convert the logits to 32 bits themselves, and 16-bit kernels on GPUs round differently.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if targets.ndim == 1:
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum")
    count = (targets != IGNORED).sum()
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size > 1:
        dist.all_reduce(count)
    return total * (world_size / count.clamp(min=1).to(total.dtype))
