"""The weight of a micro-batch in an accumulation window."""

from __future__ import annotations

import torch


def accumulated_loss(loss: torch.Tensor, window: int, accumulate: int) -> torch.Tensor:
    """Scales the loss of a micro-batch for a loop that divides it by `accumulate`, including a shorter window.

    Args:
        loss: Mean loss of the micro-batch, a scalar.
        window: Number of micro-batches in this accumulation window.
        accumulate: Number of micro-batches in a full accumulation window.
    """
    seen = loss.detach()
    # 1, or NaN if the loss is not finite: then the gradient, which all ranks share, is not finite either.
    one = 1 + (seen - seen)
    return loss * one if window == accumulate else loss * (one * (accumulate / window))
