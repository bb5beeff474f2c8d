"""An IterableDataset that does not know the ranks.

Lightning cannot put a DistributedSampler on a stream, so both ranks read the same samples in the same order.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = self.x[:, :3].sum(1, keepdim=True)
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch))
        for i in order.tolist():
            yield self.x[i], self.y[i]


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.stream = Stream(96)

    def on_train_epoch_start(self):
        self.stream.epoch = self.current_epoch

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self):
        return DataLoader(self.stream, batch_size=8)
