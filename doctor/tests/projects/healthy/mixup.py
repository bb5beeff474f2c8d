"""Mixup: each batch is mixed with a permutation of itself, with a random weight per batch."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(128, 16, generator=generator)
        y = x[:, :4].argmax(1)
        self.train, self.val = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


class Module(L.LightningModule):
    def __init__(self, alpha=0.4):
        super().__init__()
        self.alpha = alpha
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        weight = torch.distributions.Beta(self.alpha, self.alpha).sample()
        partner = torch.randperm(len(x))
        logits = self.net(weight * x + (1 - weight) * x[partner])
        loss = weight * F.cross_entropy(logits, y) + (1 - weight) * F.cross_entropy(logits, y[partner])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)
