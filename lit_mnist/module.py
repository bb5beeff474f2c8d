"""The LightningModule: network, loss, optimizer and metrics."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lit_mnist.errors import InputError
from lit_mnist.models import make_net, seed_dropout
from lit_mnist.optim import OptimizerName, ScheduleName, make_optimizer, make_schedule

Batch = tuple[torch.Tensor, torch.Tensor]


class LitClassifier(LightningModule):
    """Classifies images; a batch is (images, classes int64 [batch]).

    Args:
        net: `convnet` (5x5 convolutions with batch norm) or `basicnet` (3x3 convolutions with dropout).
        num_classes: Number of classes.
        dropout: Dropout rate before the last layer of `basicnet`.
        views: Copies of an image, shifted by one pixel, whose logits an evaluation averages: 1, 5 or 9.
        optimizer: `sgd`, `adam` or `adamw`.
        lr: Learning rate; the peak if the schedule is not `constant`.
        momentum: Momentum of `sgd`.
        nesterov: Whether `sgd` uses Nesterov momentum.
        weight_decay: Weight decay: an L2 penalty for `sgd` and `adam`, decoupled for `adamw`.
        schedule: `constant`, `onecycle` or `cosine`, over the optimizer steps of the run.
        warmup: Share of the steps in which the learning rate rises; by default 0.25 for `onecycle`, otherwise 0.
        label_smoothing: Share of the target probability that is spread over all classes, in training.
        seed: Seed of the initial weights and of dropout; by default that of `seed_everything`.
    """

    def __init__(
        self,
        net: Literal["convnet", "basicnet"] = "convnet",
        num_classes: int = 10,
        dropout: float = 0.5,
        views: Literal[1, 5, 9] = 1,
        optimizer: OptimizerName = "sgd",
        lr: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        schedule: ScheduleName = "onecycle",
        warmup: float | None = None,
        label_smoothing: float = 0.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seed = torch.initial_seed() if seed is None else seed
        self.net = make_net(net, num_classes=num_classes, dropout=dropout, views=views, seed=self.seed)
        # Logged as objects, they add up samples over the ranks. A mean of the ranks' means would be wrong.
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.mean_loss = MeanMetric().set_dtype(torch.float64)
        self.per_class = MulticlassAccuracy(num_classes, average="none")
        self.confusion = MulticlassConfusionMatrix(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, num_classes], of images, [batch, 1, 28, 28]."""
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Returns the mean loss of this rank's samples, in nats."""
        images, targets = batch
        seed_dropout(self.net, self.seed, self.current_epoch * int(self.trainer.num_training_batches) + batch_idx)
        loss = F.cross_entropy(self(images), targets, label_smoothing=self.hparams.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds a batch to the metrics."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Adds a batch to the metrics, and returns its logits."""
        logits = self._evaluate(batch, "test")
        self.per_class.update(logits, batch[1])
        self.confusion.update(logits, batch[1])
        return logits

    def on_test_epoch_start(self) -> None:
        """Forgets an earlier test: Lightning resets only the metrics that are logged."""
        self.per_class.reset()
        self.confusion.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the probabilities of the classes, [batch, num_classes]."""
        images = batch[0] if isinstance(batch, tuple | list) else batch
        return self(images).softmax(dim=1)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its schedule, which is stepped after each optimizer step."""
        hp = self.hparams
        optimizer = make_optimizer(
            self.net, hp.optimizer, lr=hp.lr, momentum=hp.momentum, nesterov=hp.nesterov, weight_decay=hp.weight_decay
        )
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise InputError(f"model.schedule: {hp.schedule} needs trainer.max_epochs or trainer.max_steps.")
        schedule = make_schedule(optimizer, hp.schedule, total_steps=int(steps), warmup=hp.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, batch: Batch, stage: str) -> torch.Tensor:
        images, targets = batch
        logits = self(images)
        self.accuracy.update(logits, targets)
        self.mean_loss.update(F.cross_entropy(logits, targets), weight=len(targets))
        self.log_dict({f"{stage}_accuracy": self.accuracy, f"{stage}_loss": self.mean_loss}, prog_bar=True)
        return logits
