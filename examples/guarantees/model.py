"""A small LightningModule and its data. The variable KILL_AT kills rank 1 at that step of the training."""

import os
import signal

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_fit_end(self):
        if self.global_rank == 0:
            torch.save(self.net.state_dict(), "weights.pt")


def loader():
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(1280, 8, generator=generator), torch.randint(3, (1280,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
