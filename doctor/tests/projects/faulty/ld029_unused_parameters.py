"""A head that the loss does not use.

DDP waits for the gradient of the auxiliary head; torch reports it at the second step.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 3)
        self.auxiliary_head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.trunk(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(16)
        x = torch.randn(96, 16, generator=generator)
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
