"""A correct module for which Lightning 2.6.6 logs a wrong mean.

The sampler gives each of the 25 samples once, 13 to one rank and 12 to the other, and each value has its batch size.
Lightning averages the integer number of samples over the ranks and drops the fraction (PL#21859): 12 instead of 12.5.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EachSampleOnce(DistributedSampler):
    """Splits the samples over the ranks without a repeated one."""

    def __iter__(self):
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self):
        return len(range(self.rank, len(self.dataset), self.num_replicas))


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(10)
        x = torch.randn(121, 16, generator=generator)
        y = (x[:, :2].sum(1) > 0).long()
        self.train = TensorDataset(x[:96], y[:96])
        self.val = TensorDataset(x[96:], y[96:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        sampler = EachSampleOnce(
            self.val, num_replicas=self.trainer.world_size, rank=self.trainer.global_rank, shuffle=False
        )
        return DataLoader(self.val, batch_size=8, sampler=sampler)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        n = len(y)
        correct = (self.net(x).argmax(1) == y).sum()
        self.log("val_accuracy", correct / n, batch_size=n, sync_dist=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
