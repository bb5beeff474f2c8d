"""Predictions that are returned, and a report with their number that rank 0 writes after the prediction."""

import json
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
        self.batches = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def predict_step(self, batch, batch_idx):
        self.batches += 1
        return self.net(batch[0])

    def on_predict_epoch_end(self):
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir)
            (folder / "report.json").write_text(json.dumps({"batches": self.batches, "model": "net"}))
            (folder / "report.txt").write_text("prediction finished\n")
            torch.save({"batches": self.batches}, folder / "report.pt")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        x = torch.randn(96, 16, generator=torch.Generator().manual_seed(18))
        return DataLoader(TensorDataset(x, x[:, :1] ** 2), batch_size=8, shuffle=True)

    def predict_dataloader(self):
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(19))
        return DataLoader(TensorDataset(x), batch_size=8)
