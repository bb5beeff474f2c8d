"""A rank-aware sampler that Lightning splits a second time.

The sampler gives each rank its own part, but it is no DistributedSampler. Lightning therefore wraps it in one of its
own samplers, which shuffles its order and gives each rank half of its part: the other samples are never seen.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset


class EasyFirstSampler(Sampler):
    """Gives each rank every n-th sample, from the easy to the hard ones."""

    def __init__(self, difficulty, rank, world_size):
        self.order = difficulty.argsort().tolist()
        self.rank = rank
        self.world_size = world_size

    def __iter__(self):
        return iter(self.order[self.rank :: self.world_size])

    def __len__(self):
        return len(self.order) // self.world_size


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(96, 16, generator=generator)
        self.train = TensorDataset(x, (x.mean(1) > 0).long())
        self.difficulty = x.norm(dim=1)

    def train_dataloader(self):
        sampler = EasyFirstSampler(self.difficulty, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(self.train, batch_size=8, sampler=sampler)


class Module(L.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
