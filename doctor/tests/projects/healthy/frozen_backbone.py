"""A frozen backbone that stays in evaluation mode while the head is trained."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 24), nn.ReLU())
        self.backbone.requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(24, 3))
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(128, 16, generator=generator)
        y = x[:, :3].argmax(1)
        self.train_set, self.val_set = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def on_train_epoch_start(self):
        self.backbone.eval()

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=16)
