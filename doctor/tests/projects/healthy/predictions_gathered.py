"""Predictions with the indices of their samples; rank 0 gathers them and writes them in order."""

from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Indexed(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index]


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        x = torch.randn(121, 16, generator=torch.Generator().manual_seed(8))
        self.train = TensorDataset(x[:96], x[:96, :3].argmax(1))
        self.test = Indexed(x[96:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def predict_dataloader(self):
        return DataLoader(self.test, batch_size=8)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
        self.predictions = {}

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def predict_step(self, batch, batch_idx):
        index, x = batch
        label = self.net(x).argmax(1)
        self.predictions.update(zip(index.tolist(), label.tolist(), strict=True))
        return index, label

    def on_predict_epoch_end(self):
        parts = [self.predictions]
        if self.trainer.world_size > 1:
            parts = [None] * self.trainer.world_size
            dist.all_gather_object(parts, self.predictions)
        if self.trainer.is_global_zero:
            found = {index: label for part in parts for index, label in part.items()}
            labels = torch.tensor([found[index] for index in sorted(found)])
            torch.save(labels, Path(self.trainer.default_root_dir) / "predictions.pt")
        self.predictions = {}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
