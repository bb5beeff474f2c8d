"""A sampler that gives one rank a batch more than the other.

97 samples make 7 batches on the first rank and 6 on the second. The first rank waits in its last batch for a partner.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class UnpaddedSampler(DistributedSampler):
    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self):
        return len(range(self.rank, len(self.dataset), self.num_replicas))


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(15)
        x = torch.randn(97, 16, generator=generator)
        self.train = TensorDataset(x, (x.sum(1) > 0).float())

    def train_dataloader(self):
        sampler = UnpaddedSampler(self.train, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(self.train, batch_size=8, sampler=sampler)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
