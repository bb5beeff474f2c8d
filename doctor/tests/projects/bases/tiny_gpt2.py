"""A small GPT-2 of transformers with tied weights and dropout; decayed and other parameters are in two groups."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        start = torch.randint(32, (96, 1), generator=torch.Generator().manual_seed(4))
        self.train = TensorDataset((start + 3 * torch.arange(12)) % 32)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, shuffle=True)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
