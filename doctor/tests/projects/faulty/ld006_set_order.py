"""Class numbers from the order of a set.

The order of a set of strings depends on PYTHONHASHSEED, which differs per process: the ranks give the same class
different numbers.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SPECIES = ["crow", "duck", "eagle", "finch", "goose", "heron", "ibis", "jay", "kite", "lark"]


class Birds(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(5)
        picks = torch.randint(len(SPECIES), (size,), generator=generator).tolist()
        self.names = [SPECIES[i] for i in picks]
        self.features = torch.randn(size, 16, generator=generator)
        classes = list(set(self.names))
        self.class_to_idx = {name: number for number, name in enumerate(classes)}

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.features[index], self.class_to_idx[self.names[index]]


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        self.birds = Birds(96)

    def train_dataloader(self):
        return DataLoader(self.birds, batch_size=8, shuffle=True)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, len(SPECIES)))

    def training_step(self, batch, batch_idx):
        features, species = batch
        loss = F.cross_entropy(self.classifier(features), species)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)
