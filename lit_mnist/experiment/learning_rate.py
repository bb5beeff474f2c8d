"""The learning rate of a run, by its number of ranks and of steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from lit_mnist.experiment.model import ModelSettings

# Factor of the learning rate if the batch grows with the number of ranks: linear (Goyal et al.: Accurate, Large
# Minibatch SGD, 2017), or its square root, which keeps the noise of a step (Krizhevsky: One weird trick, 2014).
_LR_FACTORS: dict[str, Callable[[int], float]] = {"none": lambda ranks: 1.0, "linear": float, "sqrt": math.sqrt}
# Steps from which a one-cycle run has its whole learning rate, chosen on the default experiment's validation split:
# docs/notes/2026-11-24-short-runs.md.
SHORT_RUN = 240


def scaled_lr(settings: ModelSettings, world_size: int) -> float:
    """Returns the (peak) learning rate for a number of ranks, of a run that is long enough for it."""
    return settings.lr * _LR_FACTORS[settings.lr_scale](world_size)


def peak_lr(settings: ModelSettings, world_size: int, total_steps: int) -> float:
    """Returns the (peak) learning rate of a run.

    In a short run, the one-cycle schedule would reach the default learning rate within a few steps, and SGD would
    diverge. The peak then grows linearly with the number of steps. Another learning rate is the user's choice:

        >>> [round(peak_lr(ModelSettings(lr=lr), 1, 30), 4) for lr in (0.1, 0.05)]
        [0.0125, 0.05]

    Args:
        settings: The section `model`.
        world_size: Number of ranks.
        total_steps: Optimizer steps of the run.
    """
    lr = scaled_lr(settings, world_size)
    is_default = settings.lr == ModelSettings.lr and settings.schedule == "onecycle" and settings.optimizer == "sgd"
    if not is_default or total_steps >= SHORT_RUN:
        return lr
    return min(lr, max(lr, 1 - settings.momentum) * total_steps / SHORT_RUN)


def explain_peak(settings: ModelSettings, world_size: int, total_steps: int) -> str:
    """Returns a sentence about a peak that is lower than the learning rate, or an empty string."""
    whole, peak = scaled_lr(settings, world_size), peak_lr(settings, world_size, total_steps)
    if peak == whole:
        return ""
    steps = f"{total_steps} step{'s' * (total_steps != 1)}"
    return (
        f"the learning rate rises to {peak:.4g} instead of {whole:.4g} (model.lr), because the one-cycle schedule has "
        f"only {steps}, fewer than {SHORT_RUN}"
    )
