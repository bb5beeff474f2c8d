"""What ExactCheckpoint uses of the private parts of Lightning and torch, so that a change in them is detected."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from modules import AutoEncoder, Streaming, WithMetrics
from torch.utils.data import DataLoader

from lit_mnist.plugins import ExactCheckpoint, lightning_internals
from lit_mnist.plugins.trainer_state.lightning_internals import TrainerState


class Probe(Callback):
    """Calls a function between two batches."""

    def __init__(self, batch: int, work: Any) -> None:
        self.batch, self.work = batch, work

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.work(trainer)


def _trainer(*callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=1, max_epochs=1, limit_val_batches=1, num_sanity_val_steps=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        **options,
    )  # fmt: skip


def test_the_signal_handling_of_a_trainer_is_disabled_for_a_while() -> None:
    trainer = _trainer()
    owners = trainer._signal_connector, trainer.fit_loop.epoch_loop
    assert callable(owners[0].register_signal_handlers)
    assert callable(owners[1]._broadcast_sigterm_tensor)
    before = [dict(vars(owner)) for owner in owners]
    with lightning_internals.handles_no_signals(trainer):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


def test_a_dataloader_iter_is_found() -> None:
    class Iterating(LightningModule):
        def training_step(self, dataloader_iter: Iterator[Any]) -> None: ...

    assert lightning_internals.uses_dataloader_iter(Iterating())
    assert not lightning_internals.uses_dataloader_iter(AutoEncoder())


def test_a_change_in_place_is_found() -> None:
    tensor = torch.zeros(2)
    before = lightning_internals.tensor_version(tensor)
    tensor.add_(1)
    assert lightning_internals.tensor_version(tensor) > before
    with torch.inference_mode():
        assert lightning_internals.tensor_version(torch.zeros(2)) == 0


def test_the_attributes_of_the_framework_are_known() -> None:
    names = lightning_internals.names_of_the_framework()
    assert {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_metric_attributes"} <= names
    assert not {"training", "_hparams", "_automatic_optimization", "_param_requires_grad_state"} & names
    own = {"_automatic_optimization", "_param_requires_grad_state"}
    assert own <= set(vars(LightningModule()))


def test_the_loops_call_the_wrapped_functions() -> None:
    calls: list[str] = []
    trainer = _trainer(Probe(0, lambda _: calls.append("batch")))

    @contextmanager
    def around() -> Iterator[None]:
        calls.append("before")
        yield
        calls.append("after")

    undo = lightning_internals.wrap_setup_data(trainer.fit_loop, around)
    lightning_internals.skip_restart_logic(trainer)
    assert "on_run_start" in vars(trainer.fit_loop.epoch_loop)
    trainer.fit(AutoEncoder())
    # Once for the fit, and once for the epoch.
    assert calls == ["before", "after", "before", "after", "batch"]
    assert "on_run_start" not in vars(trainer.fit_loop.epoch_loop)
    undo()
    assert "setup_data" not in vars(trainer.fit_loop)
    assert inspect.signature(trainer.fit_loop.epoch_loop.on_run_start).parameters.keys() == {"data_fetcher"}


@pytest.mark.parametrize(("module", "ahead"), [(AutoEncoder(), 0), (Streaming(), 1)])
def test_the_fetcher_and_the_combined_loader(module: LightningModule, ahead: int) -> None:
    found: list[Any] = []

    def work(trainer: Trainer) -> None:
        found.append(lightning_internals.prefetched_batches(trainer))

    _trainer(Probe(2, work)).fit(module)
    assert found == [ahead]


def test_the_ended_loaders_of_several_are_known_and_set() -> None:
    class Several(LightningModule):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> None: ...

    found: list[Any] = []

    def work(trainer: Trainer) -> None:
        found.append(lightning_internals.consumed_loaders(trainer))
        lightning_internals.set_consumed_loaders(trainer, [True, True])
        found.append(lightning_internals.consumed_loaders(trainer))

    class Unsized:
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.count))

    loaders = CombinedLoader([Unsized(9), Unsized(2)], "max_size_cycle")
    _trainer(Probe(3, work)).fit(Several(), loaders)
    assert found == [[False, True], [True, True]]


@pytest.mark.parametrize("kind", [AutoEncoder, WithMetrics])
def test_sums_of_logged_values_are_restored(kind: Any) -> None:
    """The sums of half an epoch, moved to another Trainer, give the metrics of the whole one."""
    whole = _trainer()
    seed_everything(1, verbose=False)
    whole.fit(kind(), DataLoader(kind().train_dataloader().dataset, 6))
    expected = {name: float(value) for name, value in whole.callback_metrics.items()}

    state: list[Any] = []

    def keep(trainer: Trainer) -> None:
        saved = TrainerState(trainer).save()
        results = trainer.fit_loop.epoch_loop._results
        before = {key: _states(each) for key, each in results.items()}
        results.clear()
        TrainerState(trainer).load(saved, has_ended=False)
        # The same metadata: else Lightning rejects the next value of this name.
        assert {key: _states(each) for key, each in results.items()} == before
        state.append(before)

    probed = _trainer(Probe(7, keep))
    seed_everything(1, verbose=False)
    probed.fit(kind(), DataLoader(kind().train_dataloader().dataset, 6))
    assert state[0]
    assert {k: float(v) for k, v in probed.callback_metrics.items()} == expected


def _states(result: Any) -> Any:
    value = float(result.value) if result.is_tensor else id(result.value)
    count = float(getattr(result, "cumulated_batch_size", 0))
    return value, count, result.has_reset, result._update_count, result.meta.forked, result.meta.reduce_fx, result.meta


def test_a_restart_is_ended() -> None:
    trainer = _trainer(max_steps=3)
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop
    trainer.fit_loop.restarting = True
    assert all(loop.restarting for loop in loops)
    lightning_internals.end_restart(trainer)
    assert not any(loop.restarting for loop in loops)


def test_a_checkpoint_that_a_new_training_run_replaces_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = []
    for resumes in (False, False, True):
        exact = ExactCheckpoint(tmp_path, 1)
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, max_steps=2, callbacks=[exact], enable_progress_bar=False
        )
        trainer.fit(AutoEncoder(), ckpt_path=exact.last if resumes else None)
        named.append(f"{tmp_path / 'last.ckpt'} exists" in capsys.readouterr().out)
    assert named == [False, True, False]
