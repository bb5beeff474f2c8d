"""Functional dropout that ignores the mode.

`F.dropout` is active by default; `training=self.training` is missing, so validation drops units, too.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(size, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (size,), generator=generator)
    return TensorDataset(torch.randn(size, 16, generator=generator) + y[:, None], y)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(blobs(96, 0), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(blobs(32, 1), batch_size=8)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 64)
        self.fc2 = nn.Linear(64, 4)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.dropout(x, 0.4)
        return self.fc2(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
