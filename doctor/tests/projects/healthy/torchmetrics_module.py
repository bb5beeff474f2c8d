"""torchmetrics in the module, and a sampler of its own that gives each of 25 validation samples once."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix


class UnpaddedSampler(DistributedSampler):
    def __iter__(self):
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self):
        return len(range(self.rank, len(self.dataset), self.num_replicas))


class Data(L.LightningDataModule):
    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(121, 16, generator=generator)
        y = x[:, :4].argmax(1)
        self.train = TensorDataset(x[:96], y[:96])
        self.val = TensorDataset(x[96:], y[96:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        sampler = UnpaddedSampler(self.val, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(self.val, batch_size=8, sampler=sampler)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.train_acc = MulticlassAccuracy(4, average="micro")
        self.val_metrics = MetricCollection(
            {"acc": MulticlassAccuracy(4, average="micro"), "macro_acc": MulticlassAccuracy(4)}, prefix="val_"
        )
        self.confusion = MulticlassConfusionMatrix(4)
        self.val_loss = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.train_acc(logits, y)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.val_metrics.update(logits, y)
        self.confusion.update(logits, y)
        self.val_loss.update(F.cross_entropy(logits, y), weight=len(y))
        self.log_dict(self.val_metrics)
        self.log("val_loss", self.val_loss)

    def on_validation_epoch_end(self):
        self.samples_seen = int(self.confusion.compute().sum())
        self.confusion.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
