"""A LitTrainer decides in each step as a stock Trainer does, with fewer questions."""

from __future__ import annotations

import json
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHILD_ENV
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


class Deep(BoringModel):
    """Counts the pages that the kernel maps in a thousand calls, at each of many depths of the stack."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.most = max(self._faults(depth) for depth in range(150))
        return super().training_step(batch, batch_idx)

    def _faults(self, depth: int) -> int:
        if depth:
            return self._faults(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(1000):
            self._do_nothing()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def _do_nothing(self, *_: int) -> None:
        """Its frame is larger than those below, so that it is the one that does not fit at some depth."""
        a = b = c = d = e = f = g = h = i = j = k = m = n = p = q = r = 0
        del a, b, c, d, e, f, g, h, i, j, k, m, n, p, q, r


def test_no_call_of_a_step_maps_memory_for_its_frame(tmp_path: Path) -> None:
    """A stock Trainer leaves the chunk of CPython's frames in the middle of a step."""
    most = {}
    for kind in (Trainer, LitTrainer):
        model = Deep()
        bare_trainer(kind, tmp_path, max_steps=1).fit(model)
        most[kind] = model.most
    assert most[LitTrainer] < 100
    assert most[Trainer] >= 1000


SPAWNED = """
import json, sys
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from lit_mnist import LitTrainer


class Mean(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.mean = torch.nn.Linear(1, 1), MeanMetric()

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        self.mean(batch[0])
        self.log("mean", self.mean, on_epoch=True)
        self.log("plain", batch[0].mean(), batch_size=len(batch[0]), on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


if __name__ == "__main__":
    # Three samples for one rank, and two for the other.
    data = DataLoader(TensorDataset(torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])), 2)
    options = {"accelerator": "cpu", "devices": 2, "strategy": sys.argv[1], "logger": False, "max_steps": 2}
    trainer = LitTrainer(precision="32-true", enable_progress_bar=False, enable_model_summary=False, **options)
    model = Mean()
    trainer.fit(model, data, data)
    found = [{key: float(value) for key, value in trainer.callback_metrics.items()}]
    found += trainer.validate(model, data, verbose=False)
    print(json.dumps(found))
"""


def test_a_trainer_can_be_sent_to_another_process() -> None:
    """As `ddp_spawn` does. What it changed of its loops belongs to the copy."""
    trainer: Any = LitTrainer(accelerator="cpu", devices=2, strategy="ddp_spawn", max_steps=1, logger=False)
    copy = pickle.loads(pickle.dumps(trainer))  # noqa: S301
    assert copy.fit_loop.epoch_loop._build_kwargs.args[0] is copy
    assert copy._run_stage.args[0].__self__ is copy
    assert copy._exact_evaluation._trainer is copy


@pytest.mark.parametrize("strategy", [pytest.param("ddp_spawn", marks=pytest.mark.slow), "ddp_fork"])
def test_ranks_of_multiprocessing_count_exactly(strategy: str, tmp_path: Path) -> None:
    """The Trainer and its plugins are sent to the processes, before the first run and after it."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, str(program), strategy],
        cwd=tmp_path,
        env=CHILD_ENV,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [{"mean": pytest.approx(6.2), "plain": pytest.approx(6.2)}] * 2


KEPT = """
import json, resource, statistics, sys
from lightning.pytorch import LightningModule, Trainer
import torch
from lit_mnist import LitTrainer
from lit_mnist.plugins import KeepMemory


class Large(LightningModule):
    faults = []

    def training_step(self, batch, batch_idx):
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return self.net(batch).sum() + torch.zeros(10 << 20)[0]

    def on_train_end(self):
        steps = [after - before for before, after in zip(self.faults, self.faults[1:])]
        print(json.dumps({"faults": statistics.median(steps)}), flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


module = Large()
module.net = torch.nn.Linear(4, 1)
options = {"accelerator": "cpu", "devices": 1, "max_steps": 20, "enable_progress_bar": False, "logger": False}
options |= {"enable_checkpointing": False, "enable_model_summary": False}
kind = {"stock": Trainer, "KeepMemory": Trainer, "LitTrainer": LitTrainer}[sys.argv[1]]
callbacks = [KeepMemory()] if sys.argv[1] == "KeepMemory" else []
kind(callbacks=callbacks, **options).fit(module, torch.utils.data.DataLoader(torch.randn(20, 4)))
"""


def test_a_step_reuses_the_memory_that_the_step_before_has_freed(tmp_path: Path) -> None:
    """A block of 40 MiB is 10,240 pages, which the kernel maps in each step of a stock Trainer."""
    (tmp_path / "kept.py").write_text(KEPT)
    faults = {}
    for name in ("stock", "KeepMemory", "LitTrainer"):
        words = [sys.executable, str(tmp_path / "kept.py"), name]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
        faults[name] = json.loads(ended.stdout.splitlines()[-1])["faults"]
    assert faults["stock"] > 10_000
    assert faults["KeepMemory"] < 100
    assert faults["LitTrainer"] < 100
