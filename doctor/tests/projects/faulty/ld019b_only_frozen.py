"""An optimizer that holds only frozen parameters.

The backbone is frozen and the head shall be trained, but the optimizer got the parameters of the backbone: nothing
ever changes.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 3)
        self.backbone.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.backbone(x)), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.backbone.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(96, 16, generator=generator)
        return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
