"""The LightningDataModule: verified data in batches whose order depends only on the seed and the epoch."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info

from lit_mnist.data.loader import Batch, EpochLoader, EvaluationBatches
from lit_mnist.experiment import DataSettings, Experiment
from lit_mnist.training.batches import RankBatches


class MNISTDataModule(LightningDataModule):
    """Batches of MNIST, or of a set like it: `images`, float32 [samples, 1, 28, 28], and `targets`, int64 [samples].

    Args:
        seed: Seed of the split, the order and the augmentation.
        **data: The options `data.*` of the command, such as `batch_size` and `augment`. A wrong one raises InputError.
    """

    def __init__(self, seed: int = 42, **data: Any) -> None:
        super().__init__()
        self._batches = RankBatches(Experiment(seed_everything=seed, data=DataSettings(**data)))

    @property
    def batches(self) -> RankBatches:
        """The batches of this rank."""
        self._batches.trainer = self.trainer
        return self._batches

    @classmethod
    def of(cls, batches: RankBatches) -> MNISTDataModule:
        """Returns a data module for data that are already loaded."""
        module = cls()
        module._batches = batches
        return module

    def setup(self, stage: str) -> None:
        """Loads the data, and logs how many samples of an epoch are dropped."""
        if self.batches.splits and stage == "fit" and (plan := self.batches.plan).dropped:
            rank_zero_info(
                f"{plan.dropped} samples of each epoch are dropped: they do not fill a batch of {plan.batch_size}."
            )

    def train_dataloader(self) -> EpochLoader:
        """Returns the training batches of this rank. The order changes with the epoch; a resumed epoch continues."""
        return self.batches.train()

    def val_dataloader(self) -> EvaluationBatches:
        """Returns the validation batches of this rank."""
        return self.batches.evaluate(self.batches.splits.validation)

    def test_dataloader(self) -> EvaluationBatches:
        """Returns the test batches of this rank."""
        return self.batches.evaluate(self.batches.splits.test)

    def predict_dataloader(self) -> EvaluationBatches:
        """Returns the batches of the test split to predict on this rank."""
        batches = self.batches
        return batches.evaluate(batches.splits.test)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves a batch to the device without Lightning's recursive search for tensors."""
        if not isinstance(batch, Batch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch.to(device, training=self.trainer is not None and self.trainer.state.fn == "fit")
