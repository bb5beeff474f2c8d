"""The optimizer of an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lit_mnist.experiment import ModelSettings

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def make_optimizer(net: nn.Module, settings: ModelSettings) -> Optimizer:
    """Returns the optimizer of all parameters.

    Each kernel takes all parameters at once (`foreach`), to the same bits as one after the other, for which a GPU would
    have to launch several kernels each. Not fused: that rounds differently, and hides from the schedule whether the
    GradScaler left a step out.
    """
    parameters = list(net.parameters())
    if settings.optimizer == "sgd":
        return SGD(
            parameters,
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
            foreach=True,
            fused=False,
        )
    kind: type[Adam] = AdamW if settings.optimizer == "adamw" else Adam
    return kind(parameters, lr=settings.lr, weight_decay=settings.weight_decay, foreach=True, fused=False)


def accumulated_loss(loss: torch.Tensor, window: int, accumulate: int) -> torch.Tensor:
    """Weighs a micro-batch's mean loss so that, divided by `accumulate`, a shorter last window is a mean, too.

    A loss that is not finite makes its gradient so: then all ranks see it, since they share the gradient.

    Args:
        loss: Mean loss of a micro-batch, a scalar.
        window: Micro-batches in this optimizer step.
        accumulate: Micro-batches of a full optimizer step, by which the engine divides.
    """
    seen = loss.detach()
    one = 1 + (seen - seen)
    return loss * one if window == accumulate else loss * (one * (accumulate / window))


def accumulation_window(trainer: Trainer, batch_idx: int) -> int:
    """Returns the number of micro-batches in the optimizer step of a micro-batch: fewer at the end of an epoch."""
    accumulate = trainer.accumulate_grad_batches
    return int(min(accumulate, trainer.num_training_batches - batch_idx + batch_idx % accumulate))
