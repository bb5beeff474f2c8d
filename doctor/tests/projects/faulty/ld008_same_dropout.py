"""The same seed on all ranks.

The module seeds all generators when it is built, so both ranks draw the same dropout masks.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self, seed=42):
        super().__init__()
        L.seed_everything(seed, verbose=False)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(96, 16, generator=generator)
        return DataLoader(TensorDataset(x, (x[:, :5].sum(1) > 0).long()), batch_size=8, shuffle=True)
