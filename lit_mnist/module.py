"""The LightningModule: network, loss, optimizer and metrics."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lit_mnist.callbacks import ChannelsLast, ExactAccumulation, SkippedStepSchedule, SynchronizedBuffers
from lit_mnist.data.batch import Batch
from lit_mnist.models.build import ModelSettings, build_net
from lit_mnist.training import classifier


class LitClassifier(classifier.VerifiedLoading, LightningModule):
    """Image classifier. It trains on `MNISTDataModule`, or on any loader of images and targets, int64 [batch].

    Args:
        num_classes: Number of classes.
        seed: Seed of the initial weights and of dropout.
        **model: The options `model.*` of the command, such as `net` and `lr`. A wrong value raises InputError.
    """

    # Dropout is a function of the seed and the step, so that a run can resume on another number of ranks.
    state_is_step = True

    def __init__(self, num_classes: int = 10, seed: int = 42, **model: Any) -> None:
        super().__init__()
        self.settings = ModelSettings(**model)
        self.save_hyperparameters({"num_classes": num_classes, "seed": seed, **vars(self.settings)})
        self.net = build_net(self.settings, num_classes=num_classes, seed=seed)
        self.train_metrics = classifier.TrainMetrics()
        self.metrics = classifier.ClassifierMetrics(num_classes)
        self.total_steps = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [batch, classes] of normalized images [batch, channels, height, width]."""
        return self.net(images, None)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the mean loss of a micro-batch."""
        images, targets, _, rng = Batch.of(self, batch)
        logits = self.net(images, rng)
        loss = classifier.mean_loss(logits, targets, self.settings.label_smoothing)
        self.train_metrics.log(self, loss, logits, targets, batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Updates the metrics of this rank, and returns the logits."""
        images, targets, *_ = Batch.of(self, batch)
        logits = self(images)
        self.metrics.update(logits, targets)
        return logits

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Does the same for the test."""
        return self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        """Logs the metrics of all ranks."""
        self.metrics.log(self, "val")

    def on_test_epoch_end(self) -> None:
        """Logs the metrics of all ranks."""
        self.metrics.log(self, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the indices of the samples, if the loader provides them, their classes, and the probabilities."""
        images, _, indices, _ = Batch.of(self, batch)
        return indices, *classifier.predict_with_probability(self(images))

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its learning-rate schedule."""
        return classifier.configure_optimizer(self.net, self.settings, self.trainer, self.total_steps)

    def configure_callbacks(self) -> list[Callback]:
        """Returns what the training needs beside the steps, under any Trainer."""
        return [ExactAccumulation(), SkippedStepSchedule(), SynchronizedBuffers(), ChannelsLast()]
