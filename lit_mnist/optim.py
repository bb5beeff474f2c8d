"""The optimizer and its learning-rate schedule."""

import math
from typing import Any, Literal

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_mnist.errors import InputError

OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "onecycle", "cosine"]

_ONECYCLE_START, _ONECYCLE_END = 1 / 25, 1e-3


def make_optimizer(
    net: nn.Module,
    optimizer: OptimizerName = "sgd",
    *,
    lr: float = 0.1,
    momentum: float = 0.9,
    nesterov: bool = True,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Returns the optimizer of all parameters; `momentum` and `nesterov` are those of `sgd`.

    Raises:
        InputError: Torch rejects a value.
    """
    options: dict[str, Any] = {
        "lr": lr,
        "weight_decay": weight_decay,
        # One kernel updates all parameters, with bit-identical results.
        "foreach": True,
        # A fused optimizer rounds differently, and hides from the schedule whether the GradScaler skipped a step.
        "fused": False,
    }
    try:
        if optimizer == "sgd":
            return SGD(net.parameters(), momentum=momentum, nesterov=nesterov, **options)
        kind: type[Adam] = AdamW if optimizer == "adamw" else Adam
        return kind(net.parameters(), **options)
    except ValueError as error:
        raise InputError(f"model.optimizer {optimizer}: {error}") from error


def lr_factor(schedule: ScheduleName, step: int, total_steps: int, warmup: float | None = None) -> float:
    """Returns the learning rate of an optimizer step, counted from 0, as a share of the peak.

    `onecycle` rises linearly from 1/25 of the peak, and then falls linearly to 1/1000 (Smith and Topin:
    Super-Convergence, 2018). `cosine` falls along half a cosine (Loshchilov and Hutter: SGDR, 2017, without restarts).

    Args:
        schedule: The schedule.
        step: The optimizer step. Steps after the last have the learning rate of the last.
        total_steps: Optimizer steps of the run.
        warmup: Share of the steps in which the rate rises linearly; by default 0.25 for `onecycle`, otherwise 0.
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
    return 1 + (_ONECYCLE_END - 1) * done if schedule == "onecycle" else (1 + math.cos(math.pi * done)) / 2


def make_schedule(
    optimizer: Optimizer, schedule: ScheduleName = "onecycle", *, total_steps: int, warmup: float | None = None
) -> LambdaLR:
    """Returns the schedule; step it after each optimizer step that was not skipped. See `lr_factor`."""
    return LambdaLR(optimizer, lambda step: lr_factor(schedule, step, total_steps, warmup))
