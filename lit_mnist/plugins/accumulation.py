"""Exact gradient accumulation in the last window of an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lit_mnist.distributed.accumulation import accumulated_loss
from lit_mnist.errors import require


class ExactAccumulation(Callback):
    """Makes the gradient of each accumulation window the mean over its micro-batches, including the last of an epoch.

    A Trainer divides each loss by `accumulate_grad_batches`. If the last window of an epoch has fewer micro-batches,
    its gradient is too small by that ratio. The loss that `training_step` returns is scaled for it. A loss that is not
    finite makes the gradient of all ranks not finite, so that a GradScaler skips the step on all of them:

        trainer = Trainer(accumulate_grad_batches=4, callbacks=[ExactAccumulation()])

    Manual optimization is left as it is. The length of the train dataloader must be known.
    """

    def __init__(self) -> None:
        self._undo: Callable[[], None] = _nothing

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wraps the training step of the module for a fit."""
        self._restore()
        if stage != "fit" or not pl_module.automatic_optimization:
            return
        step = pl_module.training_step
        before = vars(pl_module).get("training_step")

        @wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            return _weighted(step(*args, **kwargs), trainer)

        def undo() -> None:
            vars(pl_module).pop("training_step", None)
            if before is not None:
                vars(pl_module)["training_step"] = before

        pl_module.training_step = training_step  # type: ignore[method-assign]
        self._undo = undo

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the last window of an epoch is known.

        Raises:
            InputError: The train dataloader has no length.
        """
        known = trainer.accumulate_grad_batches == 1 or math.isfinite(trainer.num_training_batches)
        require(
            known or not pl_module.automatic_optimization,
            "ExactAccumulation: the train dataloader has no length, so that the last accumulation window of an epoch "
            "is unknown. Give its dataset a __len__, set limit_train_batches to at most its number of batches, or "
            "remove the callback.",
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the training step."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the training step."""
        self._restore()

    def _restore(self) -> None:
        self._undo()
        self._undo = _nothing


def accumulation_window(trainer: Trainer) -> int:
    """Returns the number of micro-batches in the current accumulation window; the last of an epoch may be shorter."""
    batch, accumulate = trainer.fit_loop.batch_idx, trainer.accumulate_grad_batches
    return int(min(accumulate, trainer.num_training_batches - batch + batch % accumulate))


def _weighted(output: Any, trainer: Trainer) -> Any:
    """Returns what a training step has returned with its loss scaled: a tensor, a dict with `loss`, or None."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        return output
    scaled = accumulated_loss(loss, accumulation_window(trainer), trainer.accumulate_grad_batches)
    # For whoever records the losses, such as the monitor of a run.
    scaled.mean_loss = loss.detach()  # type: ignore[attr-defined]
    return {**output, "loss": scaled} if isinstance(output, Mapping) else scaled


def _nothing() -> None:
    """Undoes nothing."""
