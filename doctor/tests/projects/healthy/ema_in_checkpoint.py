"""Averaged weights that are part of the module, and so of the checkpoint; validation uses them."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self, decay=0.9):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.ema.requires_grad_(False)
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(128, 16, generator=generator)
        y = x[:, :4].sum(1, keepdim=True).sin()
        self.train_set, self.val_set = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_mse", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema.update_parameters(self.net)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_mse", F.mse_loss(self.ema(x), y), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=8)
