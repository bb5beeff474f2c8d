"""A module and a data module as somebody else would write them: nothing of this project in them."""

import os
import time

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy


class Net(LightningModule):
    def __init__(self, hidden: int = 16, lr: float = 0.01, fail: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 4))
        self.accuracy, self.mean_loss = MulticlassAccuracy(4, average="micro"), MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self._evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self._evaluate(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(dim=1)

    def _evaluate(self, batch, stage):
        logits = self.net(batch[0])
        self.accuracy.update(logits, batch[1])
        self.mean_loss.update(F.cross_entropy(logits, batch[1]), weight=len(batch[1]))
        self.log_dict({f"{stage}_accuracy": self.accuracy, f"{stage}_loss": self.mean_loss})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Points(LightningDataModule):
    def __init__(self, batch_size: int = 12, loader: str = "torch.utils.data.DataLoader") -> None:
        super().__init__()
        self.batch_size, self.loader = batch_size, loader

    def _set(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        return TensorDataset(torch.randn(count, 8, generator=generator), torch.arange(count) % 4)

    def _loader(self, *args, **kwargs):
        from lit_mnist.plugins import ResumableDataLoader

        kind = DataLoader if self.loader.startswith("torch") else ResumableDataLoader
        return kind(*args, **kwargs)

    def train_dataloader(self):
        return self._loader(self._set(240, 1), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return self._loader(self._set(41, 2), batch_size=self.batch_size)

    def test_dataloader(self):
        return self._loader(self._set(41, 3), batch_size=self.batch_size)

    predict_dataloader = test_dataloader


class Fault(Callback):
    """Does something to one rank at a step: raise, nan, hang or kill_once; or slow: all steps of all ranks."""

    def __init__(self, kind: str, rank: int = 1, step: int = 5) -> None:
        self.kind, self.rank, self.step = kind, rank, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.kind == "slow":
            time.sleep(0.02)
        if trainer.global_step + 1 != self.step or trainer.global_rank != self.rank:
            return
        if self.kind == "raise":
            raise RuntimeError("the fault of the test")
        if self.kind == "nan":
            batch[0].fill_(float("nan"))
        if self.kind == "hang":
            time.sleep(1000)
        if self.kind == "kill_once" and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
