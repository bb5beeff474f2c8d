"""A learning-rate schedule that counts the optimizer steps that were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

# The name that the key has had in all checkpoints of this project.
_KEY = "steps_made"


class SkippedStepSchedule(Callback):
    """Lets learning-rate schedules with `interval: step` wait if a GradScaler has skipped the optimizer step.

    With `precision="16-mixed"`, a step whose gradient overflows is skipped, but a Trainer advances the schedule, whose
    learning rates are then those of later steps:

        trainer = Trainer(precision="16-mixed", callbacks=[SkippedStepSchedule()])

    Schedules with `interval: epoch`, and those that monitor a metric, are left as they are. The optimizer must not be
    fused, since it would hide from its hooks whether a step was skipped.

    Attributes:
        optimizer_steps: Optimizer steps of the training that were made. It is in the checkpoint.
    """

    def __init__(self) -> None:
        self.optimizer_steps = 0
        self._undo: list[Callable[[], Any]] = []
        # By the identity of an optimizer, its steps in this fit; of a schedule, those when it was last called.
        self._steps: Counter[int] = Counter()
        self._seen: Counter[int] = Counter()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to watch the optimizers."""
        self._restore()
        self._steps.clear()
        self._seen.clear()
        for number, optimizer in enumerate(trainer.optimizers):
            self._undo.append(optimizer.register_step_post_hook(self._counter(number)).remove)
        advance = pl_module.lr_scheduler_step
        waiting = {id(each.scheduler) for each in trainer.lr_scheduler_configs if _counts_steps(each)}

        @wraps(advance)
        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            seen, steps = self._seen[id(scheduler)], self._steps[id(scheduler.optimizer)]
            self._seen[id(scheduler)] = steps
            if id(scheduler) not in waiting or steps > seen:
                advance(scheduler, metric)

        pl_module.lr_scheduler_step = lr_scheduler_step  # type: ignore[method-assign]
        self._undo.append(lambda: vars(pl_module).pop("lr_scheduler_step", None))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the watch."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the watch."""
        self._restore()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the number of optimizer steps."""
        checkpoint[_KEY] = self.optimizer_steps

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the number of optimizer steps; of a checkpoint without it, no step was skipped."""
        self.optimizer_steps = checkpoint.get(_KEY, checkpoint["global_step"])

    def _counter(self, number: int) -> Callable[..., None]:
        def count(optimizer: Any, *_: Any) -> None:
            self._steps[id(optimizer)] += 1
            self.optimizer_steps += number == 0

        return count

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _counts_steps(config: Any) -> bool:
    return config.interval == "step" and not config.reduce_on_plateau
