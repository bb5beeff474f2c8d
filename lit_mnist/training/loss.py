"""The loss of both tasks: cross-entropy over the classes, a mean over the samples or over the pixels that count."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lit_mnist.data.dataset import IGNORED


def mean_loss(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Returns this rank's loss of a micro-batch, such that the mean over the ranks is the mean of the whole one.

    Each rank has equally many images, but not equally many pixels that count: the mean of the ranks' means would
    weigh a pixel by how many others its rank holds. So a sum is divided by the count over all ranks, and multiplied by
    the number of ranks, since they average their gradients. The count is one collective; images need none.

    Args:
        logits: Floating point, [batch, classes] or [batch, classes, height, width].
        targets: Classes, int64 [batch] or [batch, height, width], in which `IGNORED` counts nowhere.
        label_smoothing: Share of the target probability spread over all classes.

    Returns:
        A scalar in nats; where no pixel of any rank counts, 0 with a gradient of zeros.
    """
    # Some engines give it in 32 bits what others leave in 16, of which a GPU's kernel makes other last bits.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if targets.ndim == 1:
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum")
    count = (targets != IGNORED).sum()
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size > 1:
        dist.all_reduce(count)
    return total * (world_size / count.clamp(min=1).to(total.dtype))
