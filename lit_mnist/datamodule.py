"""The LightningDataModule: verified pictures, cut into batches by the project's own order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lit_mnist.data.dataset import AnySplit, Scenes, dataset_of
from lit_mnist.data.device import CPU
from lit_mnist.data.epoch_loader import EpochLoader
from lit_mnist.data.loader import Batch, EvaluationBatches, TrainBatches
from lit_mnist.experiment import DataSettings, Experiment
from lit_mnist.job import Splits, plan_for, split_dataset
from lit_mnist.plan import Plan
from lit_mnist.training.precision import weight_dtype

# More than any run has: how long a training is, its Trainer knows.
_MANY_EPOCHS = 10**9


class MNISTDataModule(LightningDataModule):
    """Batches of MNIST or one of its family, or of scenes, for any Trainer, or for a loop of one's own.

    Its loaders know their rank, and are not torch DataLoaders, so that a Trainer does not shard them again.

    Args:
        seed: Seed of the split, the order and the augmentation.
        **kwargs: The settings of `DataSettings`.
    """

    def __init__(self, seed: int = 42, **kwargs: Any) -> None:
        super().__init__()
        self.settings = DataSettings(**kwargs)
        self.experiment = Experiment(seed_everything=seed, data=self.settings)
        self._splits: Splits | None = None
        self._plan: Plan | None = None

    @classmethod
    def of(cls, experiment: Experiment, splits: Splits, plan: Plan) -> MNISTDataModule:
        """Returns a data module with data that are loaded already."""
        module = cls()
        module.settings, module.experiment = experiment.data, experiment
        module._splits, module._plan = splits, plan
        return module

    def setup(self, stage: str) -> None:
        """Loads the data, and tells what of them is left out of a training."""
        if self.splits and stage == "fit" and self.plan.dropped:
            rank_zero_info(
                f"{self.plan.dropped} samples of each epoch fill no whole batch of {self.plan.batch_size} and are left "
                "out."
            )

    @property
    def splits(self) -> Splits:
        """The samples, loaded at the first need."""
        if self._splits is None:
            self._splits = split_dataset(self.experiment, dataset_of(self.settings))
        return self._splits

    @property
    def plan(self) -> Plan:
        """The batches of an epoch; the epochs and steps of the run only where it was given to `of`."""
        if self._plan is not None:
            return self._plan
        endless = self.experiment.replace("trainer", max_epochs=_MANY_EPOCHS)
        return plan_for(endless, self.splits, self._rank[1])

    @property
    def _rank(self) -> tuple[int, int]:
        """This rank, and the number of all ranks."""
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

    def train_dataloader(self) -> EpochLoader:
        """Returns this rank's micro-batches, in an order that follows the epoch, from where the run stands."""
        return EpochLoader(self._train_batches, self._first, self.trainer.current_epoch if self.trainer else 0)

    def _train_batches(self, epoch: int, first: int) -> TrainBatches:
        return TrainBatches(
            self.splits.train,
            plan=self.plan,
            settings=self.settings,
            seed=self.experiment.seed_everything,
            # A Trainer that overfits wants the same few batches in each epoch.
            epoch=0 if getattr(self.trainer, "overfit_batches", 0) else epoch,
            rank=self._rank[0],
            first=first,
            dtype=self._dtype,
            device=self._device,
        )

    def _first(self) -> int:
        """Returns the micro-batch of its epoch that the Trainer asks for next: not 0 only in an epoch that it resumes.

        The Trainer's own count, and not a function of the step: limits and schedules of accumulation change how many
        steps an epoch has.
        """
        return self.trainer.fit_loop.batch_idx + 1 if self.trainer is not None and self.trainer.training else 0

    def val_dataloader(self) -> EvaluationBatches:
        """Returns this rank's part of the validation split."""
        return self._evaluation(self.splits.validation)

    def test_dataloader(self) -> EvaluationBatches:
        """Returns this rank's part of the test split."""
        return self._evaluation(self.splits.test)

    def predict_dataloader(self) -> EvaluationBatches:
        """Returns this rank's part of the test split."""
        split = self.splits.test
        # See Job.evaluation_batches.
        return self._evaluation(split, batch_size=1 if isinstance(split, Scenes) else None)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch as the other engines do, without a search for tensors in all that it holds."""
        if not isinstance(batch, Batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        moved = batch.to(device)
        fits = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        # On GPUs DDP would move the samples' numbers, too, and wait for that; only a test asks for them.
        return moved._replace(indices=moved.targets[:0]) if fits and device.type == "cuda" else moved

    def _evaluation(self, split: AnySplit, batch_size: int | None = None) -> EvaluationBatches:
        rank, world_size = self._rank
        return EvaluationBatches(
            split,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size or self.settings.evaluated_at_once,
            settings=self.settings,
            dtype=self._dtype,
            device=self._device,
        )
