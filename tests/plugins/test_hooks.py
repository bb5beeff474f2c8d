"""A LitTrainer calls the hooks that a stock Trainer calls, and skips only those that nobody has."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import SimpleProfiler
from trainers import bare_trainer

from lit_mnist import LitTrainer
from lit_mnist.plugins.step.lightning_internals import EMPTY_HOOKS

Calls = list[tuple[str, str, str | None]]
HOOKS = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if name.startswith("on_")]


def recording(kind: type, calls: Calls, names: list[str]) -> type:
    """Returns a subclass whose hooks note their calls, with the name that Lightning gives to what they log."""

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            module = self if isinstance(self, LightningModule) else args[1]
            calls.append((kind.__name__, name, module._current_fx_name))
            return getattr(super(made, self), name)(*args, **kwargs)

        return hook

    made: type = type(kind.__name__, (kind,), {name: noting(name) for name in names})
    return made


def run(kind: type[Trainer], folder: Path, *callbacks: Callback, module: LightningModule, **options: Any) -> None:
    limits = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2}
    bare_trainer(kind, folder, *callbacks, **limits, **options).fit(module)


def test_every_hook_is_called_as_by_a_stock_trainer(tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, LitTrainer):
        calls: Calls = []
        own = [*EMPTY_HOOKS, "optimizer_step", "backward", "configure_gradient_clipping", "optimizer_zero_grad"]
        module, callback = recording(BoringModel, calls, own)(), recording(Callback, calls, HOOKS)()
        run(kind, tmp_path, callback, module=module)
        found.append([call for call in calls if "checkpoint" not in call[1]])
    assert found[0] == found[1]
    assert {name for _, name, _ in found[0]} >= {"on_train_batch_start", "on_before_zero_grad", "backward"}


def test_hooks_that_are_added_in_training_are_called(tmp_path: Path) -> None:
    seen = []

    class Adds(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.on_after_backward = lambda *_: seen.append("callback")  # type: ignore[method-assign]
            pl_module.on_after_backward = lambda: seen.append("module")  # type: ignore[method-assign]
            late = Callback()
            late.on_train_batch_end = lambda *_: seen.append("late")  # type: ignore[method-assign]
            trainer.callbacks.append(late)

    run(LitTrainer, tmp_path, Adds(), module=BoringModel())
    assert {name: seen.count(name) for name in seen} == {"callback": 6, "module": 6, "late": 6}


def test_a_callback_may_log(tmp_path: Path) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            pl_module.log("seen", torch.ones(()), on_epoch=True)

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert trainer.callback_metrics["seen"] == 1

    run(LitTrainer, tmp_path, Logs(), module=BoringModel())


def test_a_profiler_sees_every_hook(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    run(LitTrainer, tmp_path, Callback(), module=BoringModel(), profiler=profiler)
    assert len(profiler.recorded_durations["[LightningModule]BoringModel.on_after_backward"]) == 6
    assert len(profiler.recorded_durations["[Callback]Callback.on_after_backward"]) == 6


@pytest.mark.parametrize("name", sorted(EMPTY_HOOKS))
def test_a_hook_that_is_skipped_does_nothing_in_lightning(name: str) -> None:
    code = getattr(LightningModule, name).__code__
    # Besides its docstring, it has no constant, and it reads no name.
    assert not code.co_names
    assert set(code.co_consts[1:]) <= {None}
