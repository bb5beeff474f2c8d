"""An EMA teacher that is not in the checkpoint.

The teacher is kept in a plain list, so that the optimizer does not see it. The checkpoint does not contain it either:
a resumed run starts with a new teacher.
"""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def train_dataloader(self):
        generator = torch.Generator().manual_seed(13)
        x = torch.randn(96, 16, generator=generator)
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)


class Module(L.LightningModule):
    def __init__(self, decay=0.8):
        super().__init__()
        self.decay = decay
        self.student = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
        self.teacher = []

    def on_train_start(self):
        self.teacher = [copy.deepcopy(self.student).requires_grad_(False)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.student(x)
        consistency = F.mse_loss(logits.softmax(1), self.teacher[0](x).softmax(1))
        loss = F.cross_entropy(logits, y) + 5 * consistency
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for slow, fast in zip(self.teacher[0].parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 1 - self.decay)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)
