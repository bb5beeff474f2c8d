"""A training with transformers' Trainer."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Classifier(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 3))

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset):
    def __init__(self, size, seed):
        self.x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index, :3].argmax()}


def main():
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        "hf",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=Rows(64, 1))
    trainer.train()
    dist.destroy_process_group()
