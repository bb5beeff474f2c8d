"""The progress display of a Trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn

from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.run.progress import ProgressDisplay


class RunProgressBar(ProgressBar):
    """Displays the training progress: a bar on a terminal, otherwise a line every few seconds.

    `StepMonitorCallback` passes the metrics to the display, and `RunCheckpoint` shows an epoch once it is saved. An
    evaluation has a display of its own, which disappears at the end.

    Attributes:
        display: The display on rank 0 during a training run, otherwise None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.display: ProgressDisplay | None = None
        self.is_enabled = True
        self._evaluation: ProgressDisplay | None = None

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Displays the batches of a test."""
        self._show(trainer, trainer.num_test_batches, batch_idx, dataloader_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Displays the batches of a validation, unless it is a part of a training run."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._show(trainer, trainer.num_val_batches, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Displays the batches of a prediction."""
        self._show(trainer, trainer.num_predict_batches, batch_idx, dataloader_idx)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Removes the display of an evaluation."""
        if self._evaluation:
            self._evaluation.clear()
            self._evaluation = None

    def _show(self, trainer: Trainer, batches: Sequence[float], number: int, loader: int) -> None:
        """Displays the batches that are complete, over all loaders."""
        if not self.is_enabled or not trainer.is_global_zero:
            return
        total = sum(batches)
        if self._evaluation is None:
            self._evaluation = ProgressDisplay(int(total) if math.isfinite(total) else None, unit="batch")
            RANK_STATUS.clear_display = self._evaluation.clear
        self._evaluation.update(int(sum(batches[:loader])) + number + 1, {})

    def disable(self) -> None:
        """Disables the display on this rank."""
        self.is_enabled = False

    def enable(self) -> None:
        """Enables the display on this rank."""
        self.is_enabled = True
