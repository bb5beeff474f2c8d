"""A learning-rate schedule that counts the optimizer steps that were made."""

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lit_mnist.errors import InputError


class SkippedStepSchedule(Callback):
    """Lets learning-rate schedules with `interval: step` wait if a GradScaler has skipped the optimizer step.

    With `precision="16-mixed"`, a step whose gradient overflows is skipped, but a Trainer advances the schedule, whose
    learning rates are then those of later steps:

        trainer = Trainer(precision="16-mixed", callbacks=[SkippedStepSchedule()])

    Schedules with `interval: epoch`, those that monitor a metric, and manual optimization are left as they are. Place
    it before callbacks that save in `on_train_batch_end`; Lightning itself does so for checkpoint callbacks.

    Raises:
        InputError: The optimizer is fused, which hides whether a step was skipped.
    """

    def __init__(self) -> None:
        self._steps_made = 0
        self._steps_seen = 0
        self._frequencies: list[tuple[LRSchedulerConfig, int]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over the schedules."""
        self._steps_seen, self._frequencies = self._steps_made, []
        if not pl_module.automatic_optimization:
            return
        trainer.optimizers[0].register_step_post_hook(self._count)
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            return
        if any(group.get("fused") for group in trainer.optimizers[0].param_groups):
            raise InputError("A fused optimizer hides whether a step was skipped: set fused=False.")
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                self._frequencies.append((config, config.frequency))
                # The Trainer never reaches it, so that this callback alone advances the schedule.
                config.frequency = sys.maxsize

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advances the schedules if the optimizer has made a step."""
        made, self._steps_seen = self._steps_made > self._steps_seen, self._steps_made
        for config, frequency in self._frequencies:
            if made and (batch_idx + 1) % frequency == 0:
                pl_module.lr_scheduler_step(config.scheduler, None)

    def _count(self, *_: Any) -> None:
        self._steps_made += 1
