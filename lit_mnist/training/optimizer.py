"""The optimizer of an experiment."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lit_mnist.experiment.model import ModelSettings


def make_optimizer(net: nn.Module, settings: ModelSettings, lr: float | None = None) -> Optimizer:
    """Returns the optimizer of all parameters.

    Args:
        net: The network.
        settings: The section `model`.
        lr: The learning rate, or its peak; `settings.lr` if unset.
    """
    options: dict[str, Any] = {
        "lr": settings.lr if lr is None else lr,
        "weight_decay": settings.weight_decay,
        # One kernel updates all parameters, with bit-identical results.
        "foreach": True,
        # A fused optimizer rounds differently, and hides from the schedule whether the GradScaler skipped a step.
        "fused": False,
    }
    if settings.optimizer == "sgd":
        return SGD(net.parameters(), momentum=settings.momentum, nesterov=settings.nesterov, **options)
    kind: type[Adam] = AdamW if settings.optimizer == "adamw" else Adam
    return kind(net.parameters(), **options)
