"""A sum over the batch instead of a mean.

DDP averages the ranks' sums, so the step depends on the number of ranks: one process with the whole batch takes a
step twice as large.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.Tanh())
        self.decoder = nn.Linear(8, 16)
        self.criterion = nn.MSELoss(reduction="sum")

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = self.criterion(self(x), x)
        self.log("reconstruction", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        x = torch.randn(96, 16, generator=torch.Generator().manual_seed(8))
        return DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
