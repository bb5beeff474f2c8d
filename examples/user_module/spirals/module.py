"""A LightningModule that knows nothing of this project."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics.classification import MulticlassAccuracy


class SpiralsModule(LightningModule):
    """Classifies the points of spirals.

    Args:
        hidden: Number of hidden units.
        lr: Learning rate.
        activation: The class of the activation.
        dropout: Share of the hidden units that are dropped.
    """

    def __init__(self, hidden: int = 32, lr: float = 0.01, activation: type[nn.Module] = nn.ReLU, dropout: float = 0.1):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(2, hidden), activation(), nn.Dropout(dropout), nn.Linear(hidden, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def on_fit_start(self) -> None:
        # seed_everything gives all ranks one seed. Their dropout masks must differ.
        torch.manual_seed(torch.initial_seed() + self.global_rank)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.net(points)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, targets = batch
        loss = nn.functional.cross_entropy(self(points), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _evaluate(self, batch: tuple[torch.Tensor, torch.Tensor], split: str) -> None:
        points, targets = batch
        logits = self(points)
        self.accuracy(logits, targets)
        self.log(f"{split}_loss", nn.functional.cross_entropy(logits, targets), sync_dist=True)
        self.log(f"{split}_accuracy", self.accuracy)
