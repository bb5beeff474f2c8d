"""Batch norm whose statistics come from one rank's samples only.

Two ranks with 8 samples each normalize differently than one process with 16. It may be intended.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits(size, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (size,), generator=generator)
    x = torch.randn(size, 1, 8, 8, generator=generator) + y.view(-1, 1, 1, 1) / 5
    return TensorDataset(x, y)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(digits(96, seed=0), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(digits(32, seed=1), batch_size=16)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        return self.head(self.features(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
