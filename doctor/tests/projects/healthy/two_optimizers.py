"""Two optimizers with a schedule each, manual optimization, and clipping."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(96, 16, generator=generator)
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU())
        self.head = nn.Linear(32, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        loss = F.cross_entropy(self.head(self.body(x)), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            scheduler.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        body = torch.optim.SGD(self.body.parameters(), lr=0.05, momentum=0.9)
        head = torch.optim.AdamW(self.head.parameters(), lr=1e-2)
        return [body, head], [
            torch.optim.lr_scheduler.ExponentialLR(body, gamma=0.95),
            torch.optim.lr_scheduler.LinearLR(head, start_factor=0.1, total_iters=10),
        ]
