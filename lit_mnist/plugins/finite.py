"""Ends a training whose loss or gradient is infinite or NaN, on all ranks together."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lit_mnist.errors import InputError, NonFiniteError


class StopOnNonFinite(Callback):
    """Ends a training at the first loss or gradient that is infinite or NaN, on all ranks in the same step.

    Without it, one such value makes all weights NaN, and the training goes on:

        trainer = Trainer(callbacks=[StopOnNonFinite()])

    On CPUs, each step is checked before the optimizer uses the gradient. On GPUs, where the host would wait for the
    device, it is one of `log_every_n_steps` steps. A gradient that overflows in float16 is left to the GradScaler,
    until its scale falls below 1.

    Raises:
        InputError: The strategy is neither DDP nor a single device, so that the ranks do not share the gradient.
        NonFiniteError: It names the step, counted from 1, and the ranks, or says that it was the gradient.
    """

    def __init__(self) -> None:
        self._losses: torch.Tensor | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy."""
        if stage == "fit" and trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy):
            raise InputError("StopOnNonFinite needs a gradient that all ranks share: use strategy=ddp, or remove it.")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Remembers the loss."""
        spread_non_finite(loss)
        # The sum over the micro-batches of a step is finite if each loss is.
        self._losses = loss.detach() if self._losses is None else self._losses + loss.detach()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Checks the step."""
        losses, self._losses = self._losses, None
        step, every = trainer.global_step + 1, max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if losses is None or (losses.is_cuda and step % every):
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        check_finite(losses, parameters, step, getattr(trainer.precision_plugin, "scaler", None))


def spread_non_finite(loss: torch.Tensor) -> None:
    """Makes the gradient of all ranks NaN if the loss of this one is not finite; call it before the backward pass.

    A loss can be NaN although its gradient is finite, and the other ranks see the gradient alone.
    """
    zero_or_nan = loss.detach() - loss.detach()
    loss.register_hook(lambda grad: grad + zero_or_nan)


def check_finite(
    loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter], step: int, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Checks a step before the optimizer uses the gradient. Every rank must call it.

    Only if the gradient, which the ranks share, is not finite, the ranks exchange their losses.

    Args:
        loss: Loss of this rank, or the sum over its micro-batches, a scalar.
        parameters: The parameters, with the unscaled gradient of all ranks.
        step: The step, counted from 1.
        scaler: The GradScaler, if there is one.

    Raises:
        NonFiniteError: As for `StopOnNonFinite`.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if math.isfinite(get_total_norm(gradients, math.inf)):
        return
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    losses = loss.detach().float().expand(world_size).clone()
    if world_size > 1:
        dist.all_gather(list(losses.split(1)), loss.detach().float().view(1))
    failed = {rank: value for rank, value in enumerate(losses.tolist()) if not math.isfinite(value)}
    if failed:
        ranks = ", ".join(f"{value} on rank {rank}" for rank, value in failed.items())
        raise NonFiniteError(f"The loss was {ranks} in step {step}: lower the learning rate, or look at its samples.")
    if scaler is None or not scaler.is_enabled():
        raise NonFiniteError(
            f"The gradient was not finite in step {step}, though the loss of every rank was: lower the learning rate, "
            "or find the operation with detect_anomaly=True."
        )
    if (scale := scaler.get_scale()) < 1:
        raise NonFiniteError(
            f"The gradient overflows in float16 in step {step}, though the scale of the loss has fallen to {scale:g}: "
            "lower the learning rate, or use bf16-mixed or 32-true."
        )
