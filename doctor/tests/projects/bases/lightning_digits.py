"""The stock Lightning module for digits: convolutions, dropout, a schedule per epoch, and logged validation values."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits(size, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (size,), generator=generator)
    x = 0.5 * torch.randn(size, 1, 8, 8, generator=generator)
    x[torch.arange(size), 0, y % 8, :] += 1 + y[:, None] / 10
    return TensorDataset(x, y)


class Data(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.train_set = digits(96, seed=0)
        self.val_set = digits(32, seed=1)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class Module(L.LightningModule):
    def __init__(self, lr=1e-3, dropout=0.25):
        super().__init__()
        self.save_hyperparameters()
        convolutions = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
        self.net = nn.Sequential(*convolutions, nn.Dropout(dropout), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), batch_size=len(y), sync_dist=True, prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), batch_size=len(y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


if __name__ == "__main__":
    L.Trainer(max_epochs=2, accelerator="cpu", devices=2, logger=False).fit(Module(), Data())
