"""The LightningDataModule: verified data in batches whose order depends only on the seed and the epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lit_mnist.data.batch import CPU
from lit_mnist.data.dataset import Split, load_dataset
from lit_mnist.data.loader import Batch, EpochLoader, EvaluationBatches, TrainBatches
from lit_mnist.distributed.precision import weight_dtype
from lit_mnist.experiment import DataSettings, Experiment
from lit_mnist.experiment.plan import Plan
from lit_mnist.training.job import Splits, plan_for, split_dataset

# The Trainer, not the plan, limits the number of epochs.
_UNLIMITED_EPOCHS = 10**9


class MNISTDataModule(LightningDataModule):
    """Batches of MNIST, or of a data set like it, for any Trainer or your own loop.

    The loaders return the batches of this rank. They are not torch DataLoaders, so the Trainer does not shard them
    again.

    Args:
        seed: Seed of the split, the order and the augmentation.
        **kwargs: The fields of `DataSettings`, such as `batch_size` and `augment`.
    """

    def __init__(self, seed: int = 42, **kwargs: Any) -> None:
        super().__init__()
        self.settings = DataSettings(**kwargs)
        self.experiment = Experiment(seed_everything=seed, data=self.settings)
        self._splits: Splits | None = None
        self._plan: Plan | None = None

    @classmethod
    def from_splits(cls, experiment: Experiment, splits: Splits, plan: Plan) -> MNISTDataModule:
        """Returns a data module for data that are already loaded."""
        module = cls()
        module.settings, module.experiment = experiment.data, experiment
        module._splits, module._plan = splits, plan
        return module

    def setup(self, stage: str) -> None:
        """Loads the data, and logs how many samples of an epoch are dropped."""
        if self.splits and stage == "fit" and self.plan.dropped:
            rank_zero_info(
                f"{self.plan.dropped} samples of each epoch are dropped, because they do not fill a batch of "
                f"{self.plan.batch_size}."
            )

    @property
    def splits(self) -> Splits:
        """The samples to train, validate and test on, loaded on first access."""
        if self._splits is None:
            self._splits = split_dataset(self.experiment, load_dataset(self.settings))
        return self._splits

    @property
    def plan(self) -> Plan:
        """The batches of an epoch. Its numbers of epochs and steps are valid only if it came from `from_splits`."""
        if self._plan is not None:
            return self._plan
        unlimited = self.experiment.replace("trainer", max_epochs=_UNLIMITED_EPOCHS)
        plan = plan_for(unlimited, self.splits, self._rank_and_world_size[1])
        # With `overfit_batches`, every epoch has the same batches.
        return replace(plan, overfits=bool(getattr(self.trainer, "overfit_batches", 0)))

    @property
    def _rank_and_world_size(self) -> tuple[int, int]:
        """The index of this rank, and the number of ranks."""
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
        """Returns the training batches of this rank. The order changes with the epoch; a resumed epoch continues."""
        epoch = self.trainer.current_epoch if self.trainer else 0
        return EpochLoader(self._train_batches, self._first_batch_idx, epoch)

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

    def _first_batch_idx(self) -> int:
        """Returns the index of the next batch in the epoch, 0 unless the epoch is resumed."""
        # The Trainer's batch index, not a function of the step: limits and accumulation change the steps of an epoch.
        return self.trainer.fit_loop.batch_idx + 1 if self.trainer is not None and self.trainer.training else 0

    def val_dataloader(self) -> EvaluationBatches:
        """Returns the validation batches of this rank."""
        return self._evaluation(self.splits.validation)

    def test_dataloader(self) -> EvaluationBatches:
        """Returns the test batches of this rank."""
        return self._evaluation(self.splits.test)

    def predict_dataloader(self) -> EvaluationBatches:
        """Returns the batches of the test split to predict on this rank."""
        return self._evaluation(self.splits.test)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch to the device without Lightning's recursive search for tensors."""
        if not isinstance(batch, Batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        moved = batch.to(device)
        is_fitting = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        # DDP would copy the sample indices to the GPU, too, and synchronize. Only a test uses them.
        return moved._replace(indices=moved.targets[:0]) if is_fitting and device.type == "cuda" else moved

    def _evaluation(self, split: Split, batch_size: int | None = None) -> EvaluationBatches:
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
