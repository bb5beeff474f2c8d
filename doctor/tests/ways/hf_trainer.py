"""torchrun --nproc_per_node=2 hf_trainer.py"""

import torch
from model import build, samples
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Rows(Dataset):
    def __init__(self):
        self.rows = samples()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        return {"x": x, "labels": y}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


if __name__ == "__main__":
    arguments = TrainingArguments(
        "out", num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-3, use_cpu=True, report_to="none"
    )
    Trainer(Model(), arguments, train_dataset=Rows()).train()
    torch.distributed.destroy_process_group()
