"""A contrastive loss over the embeddings of all ranks, gathered with their gradient."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Data(L.LightningDataModule):
    def train_dataloader(self):
        generator = torch.Generator().manual_seed(5)
        anchor = torch.randn(96, 16, generator=generator)
        positive = anchor + 0.3 * torch.randn(96, 16, generator=generator)
        return DataLoader(TensorDataset(anchor, positive), batch_size=8, shuffle=True)


class Module(L.LightningModule):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def all_embeddings(self, z):
        if self.trainer.world_size == 1:
            return z
        return self.all_gather(z, sync_grads=True).flatten(0, 1)

    def training_step(self, batch, batch_idx):
        a, b = (F.normalize(self.encoder(view), dim=1) for view in batch)
        labels = torch.arange(len(a)) + self.global_rank * len(a)
        loss_a = F.cross_entropy(a @ self.all_embeddings(b).T / self.temperature, labels)
        loss_b = F.cross_entropy(b @ self.all_embeddings(a).T / self.temperature, labels)
        loss = (loss_a + loss_b) / 2
        self.log("contrastive", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
