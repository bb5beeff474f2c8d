"""The loss: the mean cross-entropy over the samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def mean_loss(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Returns this rank's loss. Ranks have the same number of samples: its mean over the ranks is that of all samples.

    Args:
        logits: Floating point [batch, classes].
        targets: Classes, int64 [batch].
        label_smoothing: Share of the target probability that is spread over all classes.

    Returns:
        A scalar in nats.
    """
    # Only some engines convert the logits to 32 bits themselves, and 16-bit kernels on GPUs round differently.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
