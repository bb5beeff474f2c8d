"""A LitTrainer decides in each step as a stock Trainer does, with fewer questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomIterableDataset
from lightning.pytorch.trainer.connectors import data_connector
from torch.utils.data import DataLoader
from trainers import bare_trainer

from lit_mnist import LitTrainer

Events = list[tuple[Any, ...]]


class Notes(Callback):
    """Notes each batch and each validation, and may stop the training after a step or set a hook of the data."""

    def __init__(self, events: Events, *, stop: int | None = None, late: int | None = None) -> None:
        self.events, self.stop, self.late = events, stop, late

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.events.append(("batch", trainer.current_epoch, args[2]))
        if trainer.global_step == self.stop:
            trainer.should_stop = True
        if trainer.global_step == self.late:
            owner: Any = trainer.datamodule or pl_module  # type: ignore[attr-defined]
            owner.on_after_batch_transfer = lambda batch, _: self._moved(batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.events.append(("validation", trainer.current_epoch, trainer.global_step))

    def _moved(self, batch: Any) -> Any:
        self.events.append(("late hook",))
        return batch


class DataWithHook(BoringDataModule):
    """Moves batches by itself."""

    events: Events

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.events.append(("before, data",))
        return batch


class MovesBatches(BoringModel):
    """Also has a hook that moves batches."""

    events: Events

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.events.append(("move, module",))
        return batch


def fit(kind: type[Trainer], folder: Path, module: LightningModule, data: Any, *notes: Callback, **given: Any) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 5, "limit_val_batches": 1, **given}
    trainer = bare_trainer(kind, folder, *notes, **options)
    if isinstance(data, LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_check_interval": 2},
        {"val_check_interval": 0.5},
        {"val_check_interval": 7, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2},
        {"limit_val_batches": 0},
        {"accumulate_grad_batches": 2},
        {"val_check_interval": "00:00:00:00"},
        {"fast_dev_run": 2},
        {"num_sanity_val_steps": 0, "max_steps": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("stop", [None, 3])
def test_it_validates_when_a_stock_trainer_does(tmp_path: Path, options: dict[str, Any], stop: int | None) -> None:
    found = []
    for kind in (Trainer, LitTrainer):
        events: Events = []
        fit(kind, tmp_path, BoringModel(), None, Notes(events, stop=stop), **options)
        found.append(events)
    assert found[0] == found[1]
    assert any(event[0] == "batch" for event in found[0])


def test_it_validates_on_a_loader_without_a_length(tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, LitTrainer):
        events: Events = []
        fit(kind, tmp_path, BoringModel(), DataLoader(RandomIterableDataset(32, 6)), Notes(events), max_epochs=2)
        found.append(events)
    assert found[0] == found[1]


@pytest.mark.parametrize("late", [None, 2])
@pytest.mark.parametrize("with_data", [False, True])
def test_the_same_hooks_move_a_batch(tmp_path: Path, late: int | None, *, with_data: bool) -> None:
    found = []
    for kind in (Trainer, LitTrainer):
        events: Events = []
        module, data = MovesBatches(), DataWithHook() if with_data else None
        module.events = DataWithHook.events = events
        fit(kind, tmp_path, module, data, Notes(events, late=late))
        found.append(events)
    assert found[0] == found[1]
    assert (("late hook",) in found[0]) == bool(late)
    assert (("before, data",) in found[0]) == with_data


def test_no_functions_are_compared_in_an_ordinary_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    original = data_connector.is_overridden

    def counting(name: str, *args: Any, **kwargs: Any) -> bool:
        asked.append(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(data_connector, "is_overridden", counting)
    counts = []
    for batches in (5, 25):
        asked.clear()
        fit(LitTrainer, tmp_path, BoringModel(), BoringDataModule(), limit_train_batches=batches)
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0
