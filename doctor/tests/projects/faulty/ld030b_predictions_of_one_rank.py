"""Predictions of one rank only.

Each rank predicts its part, and only rank 0 writes its list: half of the 24 predictions is missing in the file.
"""

from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.predictions = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def predict_step(self, batch, batch_idx):
        prediction = self.net(batch[0])
        self.predictions.append(prediction)
        return prediction

    def on_predict_epoch_end(self):
        if self.trainer.is_global_zero:
            torch.save(torch.cat(self.predictions), Path(self.trainer.default_root_dir) / "predictions.pt")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        x = torch.randn(96, 16, generator=torch.Generator().manual_seed(18))
        return DataLoader(TensorDataset(x, x[:, :1] ** 2), batch_size=8, shuffle=True)

    def predict_dataloader(self):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(19))
        return DataLoader(TensorDataset(x), batch_size=8)
