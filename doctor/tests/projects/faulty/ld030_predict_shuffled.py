"""A training sampler for the predictions.

`DistributedSampler` shuffles by default and repeats a sample so that the ranks get equal numbers: the predictions are
out of order, and one of the 25 samples appears twice.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(17)
        x = torch.randn(121, 16, generator=generator)
        self.train = TensorDataset(x[:96], x[:96, :3].argmax(1))
        self.test = TensorDataset(x[96:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def predict_dataloader(self):
        sampler = DistributedSampler(self.test, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(self.test, batch_size=8, sampler=sampler)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def predict_step(self, batch, batch_idx):
        (x,) = batch
        return self.net(x).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
