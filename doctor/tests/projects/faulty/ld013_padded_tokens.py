"""A mean over the labels of one rank, although the ranks have unequal numbers of labels.

Padded positions have the label -100. Each rank divides by its own number of labels and DDP averages the results with
equal weights, so a label counts for more on the rank that has fewer of them.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 20
LENGTH = 12


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(VOCABULARY, (96, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (96, 1), generator=generator)
        labels = torch.where(torch.arange(LENGTH) < lengths, (tokens + 1) % VOCABULARY, -100)
        self.train = TensorDataset(tokens, labels)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, shuffle=True)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.mixer = nn.GRU(16, 16, batch_first=True)
        self.output = nn.Linear(16, VOCABULARY)

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        states, _ = self.mixer(self.embedding(tokens))
        loss = F.cross_entropy(self.output(states).flatten(0, 1), labels.flatten(), ignore_index=-100)
        self.log("loss", loss, batch_size=len(tokens))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)
