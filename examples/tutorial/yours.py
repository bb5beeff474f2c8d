"""A LightningModule and a LightningDataModule of a user, and the same with two plugins of this project.

ddp-doctor examples/tutorial/yours.py:Digits --data examples/tutorial/yours.py:Data
lit-mnist fit --config examples/tutorial/yours.yaml --import examples.tutorial.yours --devices 2
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lit_mnist.data.dataset import load_dataset
from lit_mnist.plugins import ExactDistributedSampler, exact_metric

Loader = DataLoader[tuple[torch.Tensor, ...]]


class Data(LightningDataModule):
    """A thousand digits to train on, and 101 to validate on."""

    def setup(self, stage: str) -> None:
        """Takes the samples."""
        train = load_dataset().train
        digits = TensorDataset(train.images[:1101] / 255, train.labels[:1101])
        self.train, self.val = Subset(digits, range(1000)), Subset(digits, range(1000, 1101))

    def train_dataloader(self) -> Loader:
        """Returns the batches of an epoch; Lightning splits them over the ranks."""
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self) -> Loader:
        """Returns the batches of a validation; Lightning splits them over the ranks."""
        return DataLoader(self.val, batch_size=32)


class Digits(LightningModule):
    """A linear classifier of digits."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Adds a batch to the accuracy, which Lightning logs at the end of the epoch."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ExactData(Data):
    """The same data. The batches do not depend on the number of ranks."""

    def train_dataloader(self) -> Loader:
        """Returns batches of 60 samples over all ranks."""
        return DataLoader(self.train, batch_sampler=ExactDistributedSampler(self.train, batch_size=60, seed=1))

    def val_dataloader(self) -> Loader:
        """Returns each sample once, on one of the ranks."""
        return DataLoader(self.val, batch_sampler=ExactDistributedSampler(self.val, batch_size=60, evaluation=True))


class ExactDigits(Digits):
    """The same classifier. The accuracy is a sum over all samples, divided once."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.accuracy = exact_metric(lambda logits, labels: logits.argmax(dim=1) == labels, expected=101)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Adds a batch."""
        images, labels = batch
        self.accuracy.update(self.net(images), labels)

    def on_validation_epoch_end(self) -> None:
        """Logs the accuracy; fails if it is not that of 101 samples."""
        self.log("val_accuracy", self.accuracy.result(partial=self.trainer.sanity_checking))
