"""Learning-rate schedules, as functions of the optimizer step and the number of steps in the run."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_mnist.errors import require
from lit_mnist.experiment.model import ModelSettings

_ONECYCLE_START = 1 / 25
_ONECYCLE_END = 1e-3
_POWER = 0.9


def lr_factor(settings: ModelSettings, step: int, total_steps: int) -> float:
    """Returns the learning rate of an optimizer step as a fraction of the peak.

    `onecycle` rises linearly from 1/25 of the peak, and then falls linearly to 1/1000 (Smith and Topin:
    Super-Convergence, 2018). `cosine` falls along half a cosine (Loshchilov and Hutter: SGDR, 2017, without restarts).
    `polynomial` falls as a power of the remaining steps (Chen et al.: DeepLab, 2017).

    The first step of the warm-up is one increment above the start. The last step of the warm-up and the first step
    after it are at the peak. The end is reached one step after the last. For example, `onecycle` over 859 steps:

        >>> [round(lr_factor(ModelSettings(), step, 859), 4) for step in (0, 213, 214, 215, 216, 857, 858)]
        [0.0445, 0.9955, 1.0, 1.0, 0.9984, 0.0041, 0.0026]

    Args:
        settings: The schedule and its warm-up.
        step: The optimizer step, from 0. Later steps than the last have the learning rate of the last.
        total_steps: Optimizer steps in the run.
    """
    share = settings.warmup
    if share is None:
        share = 0.25 if settings.schedule == "onecycle" else 0.0
    rising = round(share * total_steps)
    start = _ONECYCLE_START if settings.schedule == "onecycle" else 0.0
    if step < rising:
        return start + (1 - start) * (step + 1) / rising
    if settings.schedule == "constant":
        return 1.0
    falling = total_steps - rising
    done = min(step - rising, max(falling - 1, 0)) / max(falling, 1)
    if settings.schedule == "onecycle":
        return 1 + (_ONECYCLE_END - 1) * done
    if settings.schedule == "polynomial":
        return (1 - done) ** _POWER
    return (1 + math.cos(math.pi * done)) / 2


def schedule_length(settings: ModelSettings, steps: float) -> int:
    """Returns the number of steps for the schedule of a run of `steps` optimizer steps, which may be infinite.

    Raises:
        InputError: The run is infinite, but the schedule needs a last step.
    """
    if 0 < steps < math.inf:
        return int(steps)
    endless = settings.schedule == "constant" and not settings.warmup
    require(endless, f"model.schedule {settings.schedule} needs a last step: give max_epochs or max_steps.")
    return 1


def make_schedule(optimizer: Optimizer, settings: ModelSettings, total_steps: int) -> LambdaLR:
    """Returns the schedule. It is stepped after each optimizer step that was not skipped."""
    return LambdaLR(optimizer, lambda step: lr_factor(settings, step, total_steps))
