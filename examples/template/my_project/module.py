"""The model. Replace the network, the loss and the metrics with yours."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[torch.Tensor, torch.Tensor]


class LitModel(LightningModule):
    """Classifies points of the plane.

    Args:
        hidden: Number of hidden units.
        lr: Learning rate.
    """

    def __init__(self, hidden: int = 32, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Batch norm cancels a bias before it: its gradient would be rounding noise, which differs between the ranks.
        self.net = nn.Sequential(
            nn.Linear(2, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3)
        )
        self.loss = nn.CrossEntropyLoss()
        # Metric objects add up samples over the ranks. A mean of the ranks' means is wrong if a rank has fewer samples.
        self.mean_loss = MeanMetric()
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.net(points)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        points, targets = batch
        loss = self.loss(self(points), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def _evaluate(self, batch: Batch, split: str) -> None:
        points, targets = batch
        logits = self(points)
        self.mean_loss.update(self.loss(logits, targets), weight=len(targets))
        self.accuracy.update(logits, targets)
        self.log_dict({f"{split}_loss": self.mean_loss, f"{split}_accuracy": self.accuracy})
