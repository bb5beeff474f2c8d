"""The plan of a run: the batches, steps and epochs of an experiment on a number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_mnist.errors import InputError
from lit_mnist.experiment.experiment import Experiment
from lit_mnist.experiment.learning_rate import peak_lr


@dataclass(frozen=True)
class Plan:
    """Batches, steps and epochs of a run.

    Attributes:
        world_size: Number of ranks.
        batch_size: Samples of one micro-batch over all ranks.
        accumulate: Micro-batches per optimizer step; the last step of an epoch may have fewer.
        batches_per_epoch: Micro-batches of a whole epoch; an incomplete one is dropped.
        steps_per_epoch: Optimizer steps of a whole epoch.
        total_steps: Optimizer steps of the run, limited by `max_epochs` and `max_steps`.
        epochs: Epochs of the run; `max_steps` may end the last one early.
        dropped: Samples of each epoch that do not fill a micro-batch.
        lr: The (peak) learning rate for this number of ranks.
        validate_every: Epochs between two validations; 0 for none.
        overfits: Whether every epoch repeats the batches of the first.
    """

    world_size: int
    batch_size: int
    accumulate: int
    batches_per_epoch: int
    steps_per_epoch: int
    total_steps: int
    epochs: int
    dropped: int
    lr: float
    validate_every: int = 1
    overfits: bool = False

    @classmethod
    def without_training(cls, world_size: int, lr: float) -> Plan:
        """Returns the plan of a run that only evaluates; its optimizer never steps."""
        return cls(world_size, 0, 1, 0, 0, 0, 0, 0, lr)

    def validates(self, epoch: int) -> bool:
        """Returns whether an epoch, counted from 0, ends with a validation."""
        return self.validate_every > 0 and (epoch + 1) % self.validate_every == 0

    def order_of(self, epoch: int) -> int:
        """Returns the epoch that determines the sample order: the epoch itself, or 0 if the run overfits."""
        return 0 if self.overfits else epoch

    def batches_in_epoch(self, epoch: int) -> int:
        """Returns the number of micro-batches that the run trains in an epoch, which `max_steps` may end early."""
        steps = min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)
        return max(0, min(steps * self.accumulate, self.batches_per_epoch))

    def position(self, step: int) -> tuple[int, int]:
        """Returns the position after `step` optimizer steps: the epoch, and its next micro-batch."""
        return step // self.steps_per_epoch, step % self.steps_per_epoch * self.accumulate

    def ends_accumulation_window(self, batch: int) -> bool:
        """Returns whether an optimizer step follows a micro-batch."""
        return (batch + 1) % self.accumulate == 0 or batch + 1 == self.batches_per_epoch

    def accumulation_window(self, batch: int) -> int:
        """Returns the number of micro-batches in the accumulation window of a micro-batch."""
        start = batch - batch % self.accumulate
        return min(self.accumulate, self.batches_per_epoch - start)


def make_plan(experiment: Experiment, world_size: int, train_count: int) -> Plan:
    """Computes the batches and steps of a run.

    Args:
        experiment: The experiment.
        world_size: Number of ranks over all machines.
        train_count: Number of training samples.

    Raises:
        InputError: A micro-batch cannot be split evenly over the ranks, or there are too few samples for one, or a
            limit leaves none.
    """
    data, trainer = experiment.data, experiment.trainer
    batch_size = data.batch_size * (world_size if data.batch_per == "rank" else 1)
    if batch_size % world_size:
        lower = batch_size - batch_size % world_size
        nearest = " or ".join(str(size) for size in (lower, lower + world_size) if size)
        raise InputError(
            f"data.batch_size {batch_size} cannot be split evenly over {world_size} ranks: "
            f"choose {nearest}, or another --devices."
        )
    if train_count < batch_size:
        raise InputError(
            f"There are {train_count} training samples, too few for one batch of {batch_size}: "
            "lower data.batch_size, or data.val_size, or raise data.train_size."
        )
    whole = train_count // batch_size
    batches = trainer.limit("train", whole)
    validates = data.val_size > 0 and trainer.limit_of("val") != 0
    steps_per_epoch = math.ceil(batches / trainer.accumulate_grad_batches)
    total_steps = steps_per_epoch * (1 if trainer.fast_dev_run else trainer.max_epochs)
    if trainer.max_steps != -1:
        total_steps = min(total_steps, trainer.max_steps)
    return Plan(
        world_size=world_size,
        batch_size=batch_size,
        accumulate=trainer.accumulate_grad_batches,
        batches_per_epoch=batches,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        epochs=math.ceil(total_steps / steps_per_epoch),
        dropped=train_count - whole * batch_size,
        lr=peak_lr(experiment.model, world_size, total_steps),
        validate_every=trainer.check_val_every_n_epoch if validates else 0,
        overfits=trainer.overfit_batches > 0,
    )
