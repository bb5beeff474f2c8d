"""The LightningModule: DeepLabV3, a loss over the valid pixels of all ranks, and the mean IoU."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassJaccardIndex

from lit_mnist.plugins.random_numbers import derive_seed
from segmentation.dataset import Batch
from segmentation.deeplab import DeepLab, Net, published_backbone
from segmentation.dropout import DropoutKey
from segmentation.images import IGNORED, MEAN, STD
from segmentation.loss import MeanPixelLoss, Schedule, lr_factor, pixel_loss
from segmentation.masks import WriteMasks
from segmentation.scores import BestAndWorst, image_scores


class LitSegmenter(LightningModule):
    """Predicts a class for every pixel.

    Args:
        num_classes: Number of classes, including the border if it is one.
        net: The network: torchvision's, or `deeplabv3_small`, which trains on a CPU in minutes.
        pretrained_backbone: Whether to start with torchvision's backbone, trained on ImageNet, and not at random.
        checkpoint_activations: Whether to recompute the backbone's activations in the backward pass. It uses less
            memory and more time, and trains the same weights.
        dropout: Dropout rate after the pyramid of dilated convolutions.
        optimizer: `sgd` or `adam`.
        lr: Peak of the learning rate.
        lr_scale: `linear` multiplies the learning rate by the number of ranks, for `data.batch_per: rank`.
        momentum: Momentum of `sgd`.
        nesterov: Whether `sgd` uses Nesterov momentum.
        weight_decay: Weight decay, an L2 penalty.
        schedule: `constant`, `onecycle` or `polynomial`; see `lr_factor`.
        warmup: Share of the steps in which the learning rate rises; by default 0.25 for `onecycle`, otherwise 0.
        seed: Seed of the initial weights and of dropout.
    """

    # Weights and optimizer apart, everything is a function of the step: a run resumes on any number of ranks.
    state_is_step = True

    def __init__(
        self,
        num_classes: int,
        net: Net = "deeplabv3_small",
        pretrained_backbone: bool = False,
        checkpoint_activations: bool = False,
        dropout: float = 0.5,
        optimizer: Literal["sgd", "adam"] = "sgd",
        lr: float = 0.1,
        lr_scale: Literal["none", "linear"] = "none",
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        schedule: Schedule = "onecycle",
        warmup: float | None = None,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "weights"))
            self.net = DeepLab(net, num_classes, dropout=dropout, checkpoint_activations=checkpoint_activations).to(
                memory_format=torch.channels_last
            )
        for name, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(values).view(1, 3, 1, 1) * 255, persistent=False)
        options: dict[str, Any] = {"num_classes": num_classes, "ignore_index": IGNORED, "validate_args": False}
        self.val_metrics = MetricCollection(
            {
                "loss": MeanPixelLoss(),
                "accuracy": MulticlassAccuracy(average="micro", **options),
                "mean_iou": MulticlassJaccardIndex(average="macro", **options),
            },
            prefix="val_",
        )
        self.test_metrics = self.val_metrics.clone(prefix="test_")
        self.confusion = MulticlassConfusionMatrix(**options)
        # The index and the mean IoU of each test image.
        self.scores = CatMetric()

    def forward(self, images: torch.Tensor, key: DropoutKey | None = None) -> torch.Tensor:
        """Returns logits, [batch, classes, height, width], of images, uint8 [batch, 3, height, width]."""
        logits: torch.Tensor = self.net(images.to(self.mean.dtype).sub_(self.mean).div_(self.std), key)
        return logits

    def prepare_data(self) -> None:
        """Downloads the backbone, once per machine."""
        if self._starts_from_backbone:
            published_backbone(self.hparams["net"])

    def setup(self, stage: str) -> None:
        """Loads the backbone at the start of a training."""
        if self._starts_from_backbone:
            self.net.load_state_dict(published_backbone(self.hparams["net"]), strict=False)

    def configure_callbacks(self) -> list[Callback]:
        """Returns what writes the masks of predictions, and the images of the report."""
        return [WriteMasks(), BestAndWorst()]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns the optimizer and its learning rate schedule, which advances after each optimizer step."""
        given, steps = self.hparams, self.trainer.estimated_stepping_batches
        steps = int(steps) if math.isfinite(steps) else 1
        scale = self.trainer.world_size if given["lr_scale"] == "linear" else 1
        options = {"lr": given["lr"] * scale, "weight_decay": given["weight_decay"], "foreach": True}
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.parameters(), momentum=given["momentum"], nesterov=given["nesterov"], **options)
            if given["optimizer"] == "sgd"
            else torch.optim.Adam(self.parameters(), **options)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_factor(given["schedule"], given["warmup"], step, steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Returns the loss of a batch, whose mean over the ranks is that of the global batch."""
        images, targets, _ = batch
        samples, rank = len(images), self.global_rank
        number = self.current_epoch * int(self.trainer.num_training_batches) + batch_idx
        rows = slice(rank * samples, (rank + 1) * samples)
        key = DropoutKey(self.hparams["seed"], number, samples * self.trainer.world_size, rows)
        loss, mean = pixel_loss(self(images, key), targets.long())
        self.log("train_loss", mean)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Updates this rank's metrics."""
        self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Updates this rank's metrics, and the score of each image."""
        logits, targets = self._evaluate(batch, self.test_metrics)
        predicted = logits.argmax(dim=1)
        self.confusion.update(predicted, targets)
        scores = image_scores(predicted, targets, self.hparams["num_classes"])
        self.scores.update(torch.stack([batch[2].to(scores.device), scores], dim=1))

    def on_test_epoch_end(self) -> None:
        """Logs the IoU of each class that occurs or is predicted; it is equal on all ranks."""
        confusion = self.confusion.compute()
        self.confusion.reset()
        both = confusion.diagonal()
        either = confusion.sum(dim=0) + confusion.sum(dim=1) - both
        names = getattr(self.trainer.datamodule, "class_names", range(len(both)))  # type: ignore[attr-defined]
        for name, numerator, denominator in zip(names, both, either, strict=True):
            if denominator:
                self.log(f"test_iou_{name}", numerator.double() / denominator)

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        """Returns the index, the classes, uint8 [batch, size, size], and the mean probability of each image."""
        probability, predicted = self(batch[0]).float().softmax(dim=1).max(dim=1)
        return {
            "index": batch[2],
            "mask": predicted.to(torch.uint8),
            "probability": probability.double().mean(dim=(1, 2)),
        }

    def _evaluate(self, batch: Batch, metrics: MetricCollection) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets, _ = batch
        logits, targets = self(images), targets.long()
        metrics.update(logits, targets)
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(images))
        return logits, targets

    @property
    def _starts_from_backbone(self) -> bool:
        resumes = self.trainer.ckpt_path is not None
        return self.hparams["pretrained_backbone"] and self.trainer.training and not resumes
