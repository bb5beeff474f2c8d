"""The loss of a micro-batch in its accumulation window, for the hand-written engines."""

from __future__ import annotations

import torch

from lit_mnist.distributed.accumulation import accumulated_loss
from lit_mnist.experiment.plan import Plan


def window_share(loss: torch.Tensor, plan: Plan, batch: int) -> torch.Tensor:
    """Returns the share of a micro-batch in the mean loss of its accumulation window.

    Args:
        loss: Mean loss of the micro-batch, a scalar.
        plan: Defines the accumulation windows.
        batch: Index of the micro-batch in its epoch.
    """
    return accumulated_loss(loss, plan.accumulation_window(batch), plan.accumulate) / plan.accumulate
