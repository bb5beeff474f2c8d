"""A validation set that does not divide by the number of ranks.

Lightning's DistributedSampler repeats a sample so that the ranks get equal numbers: 33 samples are counted as 34.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(9)
        x = torch.randn(129, 16, generator=generator)
        y = x[:, :4].argmax(1)
        self.train = TensorDataset(x[:96], y[:96])
        self.val = TensorDataset(x[96:], y[96:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.accuracy = MulticlassAccuracy(num_classes=4, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
