"""The batches of one rank, for a Trainer or a loop of your own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lit_mnist.data.batch import CPU
from lit_mnist.data.dataset import AnySplit, load_dataset
from lit_mnist.data.loader import EpochLoader, EvaluationBatches, TrainBatches
from lit_mnist.distributed.precision import weight_dtype
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.plan import Plan
from lit_mnist.training.job import Splits, plan_for, split_dataset

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# The Trainer, not the plan, limits the number of epochs.
_UNLIMITED_EPOCHS = 10**9


class RankBatches:
    """The loaders of an experiment. They return the batches of this rank, which a Trainer does not shard again.

    Args:
        experiment: The experiment.
        splits: The samples; by default, they are loaded on first access.
        plan: The plan of a run; by default, the number of epochs is not limited.

    Attributes:
        trainer: The Trainer that uses the loaders, or None.
    """

    def __init__(self, experiment: Experiment, splits: Splits | None = None, plan: Plan | None = None) -> None:
        self.experiment, self.settings = experiment, experiment.data
        self._splits, self._plan = splits, plan
        self.trainer: Trainer | None = None

    @property
    def splits(self) -> Splits:
        """The samples to train, validate and test on."""
        if self._splits is None:
            self._splits = split_dataset(self.experiment, load_dataset(self.settings))
        return self._splits

    @property
    def plan(self) -> Plan:
        """The batches of an epoch. Its numbers of epochs and steps are valid only if the plan was given."""
        if self._plan is not None:
            return self._plan
        unlimited = self.experiment.replace("trainer", max_epochs=_UNLIMITED_EPOCHS)
        plan = plan_for(unlimited, self.splits, self._rank_and_world_size[1])
        # With `overfit_batches`, every epoch has the same batches.
        return replace(plan, overfits=bool(getattr(self.trainer, "overfit_batches", 0)))

    def train(self) -> EpochLoader:
        """Returns the training batches. The order changes with the epoch; a resumed epoch continues."""
        return EpochLoader(self._train_batches, self._next_batch, self.trainer.current_epoch if self.trainer else 0)

    def evaluate(self, split: AnySplit, batch_size: int | None = None) -> EvaluationBatches:
        """Returns the batches of a split to evaluate, by default of `data.eval_batch_size` samples."""
        rank, world_size = self._rank_and_world_size
        return EvaluationBatches(
            split,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size or self.settings.evaluation_batch,
            settings=self.settings,
            dtype=self._dtype,
            device=self._device,
        )

    def _train_batches(self, epoch: int, first: int) -> TrainBatches:
        return TrainBatches(
            self.splits.train,
            plan=self.plan,
            settings=self.settings,
            seed=self.experiment.seed_everything,
            epoch=epoch,
            rank=self._rank_and_world_size[0],
            first=first,
            dtype=self._dtype,
            device=self._device,
        )

    def _next_batch(self) -> int:
        """Returns the index of the next batch in the epoch, 0 unless the epoch is resumed."""
        # The Trainer's batch index, not a function of the step: limits and accumulation change the steps of an epoch.
        return self.trainer.fit_loop.batch_idx + 1 if self.trainer is not None and self.trainer.training else 0

    @property
    def _rank_and_world_size(self) -> tuple[int, int]:
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer is not None else CPU

    @property
    def _dtype(self) -> torch.dtype:
        precision = self.trainer.precision if self.trainer else "32-true"
        return weight_dtype("64-true" if precision == "64-true" else "32-true")
