"""A mean over the batches' means.

On two ranks the last batch has 4 samples instead of 8, but counts as much as the others.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.val_errors = []
        generator = torch.Generator().manual_seed(12)
        x = torch.randn(136, 16, generator=generator)
        y = x[:, :1] * x[:, 1:2]
        self.train_set = TensorDataset(x[:96], y[:96])
        self.val_set = TensorDataset(x[96:], y[96:])

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_errors.append(F.mse_loss(self.net(x), y))

    def on_validation_epoch_end(self):
        self.log("val_mse", torch.stack(self.val_errors).mean(), sync_dist=True)
        self.val_errors.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=8)
