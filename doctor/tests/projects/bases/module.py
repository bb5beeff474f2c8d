"""A LightningModule with its data, and a script that trains it."""

import os

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        x = torch.randn(128, 16, generator=torch.Generator().manual_seed(7))
        y = x[:, :4].argmax(1)
        self.train, self.val = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x)

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


def main():
    L.seed_everything(3, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), **quiet)
    trainer.fit(Module(), Data())
