"""A stock Lightning module and its data, which the examples share. Nothing here knows of the plugins."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset


class Classifier(LightningModule):
    """Classifies points by the largest of their first three coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        points, classes = batch
        return F.cross_entropy(self.net(points), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def points(count: int, seed: int) -> TensorDataset:
    """Returns points, float [count, 8], and their classes, int64 [count]."""
    drawn = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(drawn, drawn[:, :3].argmax(dim=1))


def options(devices: int) -> dict[str, Any]:
    """Returns the options of a Trainer on CPUs."""
    return {"accelerator": "cpu", "devices": devices, "max_epochs": 2, "logger": False, "enable_progress_bar": False}
