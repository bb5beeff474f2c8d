"""A LitTrainer keeps what is logged as a stock Trainer does, without copying what is known of it in each call."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy
from trainers import bare_trainer

from lit_mnist import LitTrainer


class Logs(LightningModule):
    """Logs values of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.accuracy = torch.nn.Linear(2, 1), BinaryAccuracy()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        output = self.layer(batch[0]).squeeze(-1)
        loss = (output - batch[0].sum(-1)).square().mean()
        self.accuracy(output, batch[0][:, 0] > 0.5)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss.detach(), reduce_fx="max", on_epoch=True)
        self.log("number", batch_idx, on_epoch=True)
        self.log("double", loss.double(), on_epoch=True, batch_size=2)
        self.log_dict({"accuracy": self.accuracy, "constant": 2.0}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.layer(batch[0]).mean() + dataloader_idx)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Keeps(Callback):
    """Keeps what a callback sees in each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        seen: dict[str, Any] = {**trainer.callback_metrics, **trainer.progress_bar_metrics, **trainer.logged_metrics}
        self.seen.append({name: float(value) for name, value in seen.items()})


def fit(kind: type[Trainer], folder: Path) -> tuple[list[dict[str, float]], dict[str, Any], Any]:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.rand(14, 2)), batch_size=4)
    keeps = Keeps()
    # A LitTrainer trains in bfloat16 on processors that have it.
    trainer = bare_trainer(kind, folder, keeps, max_epochs=2, precision="32-true")
    module = Logs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, [loader, loader])
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return keeps.seen, metrics, trainer.test(module, loader, verbose=False)


def test_every_kind_of_value_is_logged_as_by_a_stock_trainer(tmp_path: Path) -> None:
    stock, ours = fit(Trainer, tmp_path), fit(LitTrainer, tmp_path)
    assert stock == ours
    assert len(ours[0]) == 8
    assert {"loss_step", "loss_epoch", "accuracy_epoch", "largest", "val/dataloader_idx_1"} <= set(ours[1])


def test_nothing_is_copied_in_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copies = []
    original = copy.deepcopy

    def counting(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value).__name__ == "_Metadata":
            copies.append(value)
        return original(value, *args, **kwargs)

    # Lightning's function for nested values copies dataclasses.
    monkeypatch.setattr("lightning_utilities.core.apply_func.deepcopy", counting)
    fit(Trainer, tmp_path)
    assert copies
    copies.clear()
    fit(LitTrainer, tmp_path)
    assert not copies
