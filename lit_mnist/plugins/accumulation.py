"""Exact gradient accumulation in the last window of an epoch."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lit_mnist.errors import InputError


class ExactAccumulation(Callback):
    """Makes the gradient of each accumulation window the mean over its micro-batches, also in the last of an epoch.

    A Trainer divides each loss by `accumulate_grad_batches`. Without this callback, the gradient of a last window with
    fewer micro-batches is too small by that ratio:

        trainer = Trainer(accumulate_grad_batches=4, callbacks=[ExactAccumulation()])

    The logged loss does not change. Micro-batches have equal weights: use `drop_last=True` for a mean over samples. A
    Trainer rejects `accumulate_grad_batches` with manual optimization.

    Raises:
        InputError: The train dataloader has no length, so that the last window of an epoch is unknown.
    """

    def __init__(self) -> None:
        self._factor = 1.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Finds the size of the window of a micro-batch."""
        accumulate, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        if accumulate == 1:
            return
        if math.isinf(batches):
            raise InputError(
                "The train dataloader has no length, so that the last accumulation window of an epoch is unknown. Give "
                "its dataset a __len__, set limit_train_batches to a number of batches, or remove ExactAccumulation."
            )
        window = min(accumulate, int(batches) - (batch_idx - batch_idx % accumulate))
        self._factor = accumulate / window

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Scales the gradient of a micro-batch in a shorter window."""
        if (factor := self._factor) != 1:
            loss.register_hook(lambda grad: grad * factor)
