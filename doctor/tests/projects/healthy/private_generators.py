"""Noise from generators of the module and of the data set, whose states are in no checkpoint."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self):
        self.x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
        self.rng = np.random.default_rng(torch.initial_seed() % 2**32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = self.rng.normal(0, 0.1, 16).astype("float32")
        return self.x[index] + torch.from_numpy(noise), self.x[index, :3].argmax()


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(Noisy(), batch_size=8, shuffle=True)
