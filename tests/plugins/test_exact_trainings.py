"""ExactCheckpoint with the options of a Trainer, with signals, and with what it cannot restore."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from killed_runs import SignalAt, Training, assert_resumes
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from modules import INPUTS, TARGETS, Augmented, AutoEncoder, Streaming, WithMetrics
from ranks import stock_trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.errors import InputError
from lit_mnist.plugins import ExactCheckpoint
from lit_mnist.plugins.exact_checks import check_training
from lit_mnist.plugins.folder_lock import locked

pytestmark = pytest.mark.timeout(90)


class TwoLoaders(AutoEncoder):
    """The shorter loader begins again in the middle of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["a"], batch_idx) + super().training_step(batch["b"], batch_idx)

    def train_dataloader(self) -> Any:
        first, second = TensorDataset(INPUTS, TARGETS), TensorDataset(INPUTS[:30], TARGETS[:30])
        return CombinedLoader(
            {"a": DataLoader(first, 6, shuffle=True), "b": DataLoader(second, 6, shuffle=True)}, "max_size_cycle"
        )


class TwoStreams(TwoLoaders):
    """As before, without lengths."""

    def train_dataloader(self) -> Any:
        streams = {"a": Streaming().train_dataloader(), "b": Lines()}
        return CombinedLoader(streams, "max_size_cycle")


class Lines:
    """A loader of the user's own class."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(30).split(6):
            yield INPUTS[index], TARGETS[index]


class RandomSubset(AutoEncoder):
    """Each reload of the loader has other samples."""

    def train_dataloader(self) -> Any:
        chosen = torch.randperm(len(INPUTS))[:48]
        return DataLoader(TensorDataset(INPUTS[chosen], TARGETS[chosen]), 6, shuffle=True)


class PersistentWorkers(AutoEncoder):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 6, shuffle=True, num_workers=1, persistent_workers=True)


class AugmentingWorkers(WithMetrics):
    def train_dataloader(self) -> Any:
        return DataLoader(Augmented(), 6, shuffle=True, num_workers=2)


class PlateauPerStep(WithMetrics):
    def configure_optimizers(self) -> Any:
        chosen = super().configure_optimizers()
        chosen["lr_scheduler"] |= {"interval": "step", "frequency": 5}
        return chosen


KINDS: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any], Callable[[], list[Any]]]] = {
    "accumulation": (AutoEncoder, {"accumulate_grad_batches": 3}, list),
    "a changing accumulation": (AutoEncoder, {}, lambda: [GradientAccumulationScheduler({0: 1, 1: 4})]),
    "two loaders": (TwoLoaders, {}, list),
    "two loaders without lengths": (TwoStreams, {}, list),
    "reloaded loaders": (RandomSubset, {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 5}, list),
    "validation within epochs": (PlateauPerStep, {"val_check_interval": 5}, list),
    "limited batches": (AutoEncoder, {"limit_train_batches": 10, "max_epochs": 4}, list),
    "limited streams": (Streaming, {"limit_train_batches": 10, "max_epochs": 4}, list),
    "an early stop": (AutoEncoder, {"max_epochs": 9}, lambda: [EarlyStopping("val_loss", min_delta=9.0, patience=2)]),
    "a number of steps": (AutoEncoder, {"max_steps": 42, "max_epochs": -1}, list),
    "a number of steps with validation": (
        PlateauPerStep,
        {"max_steps": 42, "max_epochs": -1, "val_check_interval": 5},
        list,
    ),
    "persistent workers": (PersistentWorkers, {}, list),
    "random numbers in workers": (AugmentingWorkers, {}, list),
    "64 bits": (WithMetrics, {"precision": "64-true"}, list),
}

QUICK = {
    "two loaders without lengths",
    "limited streams",
    "an early stop",
    "persistent workers",
}
# The save before batch 15 follows a validation, and the last start of the shorter loader in the first epoch.
KILLS = [15, 21, 36]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_a_trainer_with_options_resumes_bit_identically(kind: str, tmp_path: Path) -> None:
    make, options, callbacks = KINDS[kind]
    training = Training(make, tmp_path / "run", 1, options=options, callbacks=callbacks)
    assert_resumes(training, training.complete(), KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_with_options_that_is_killed_once_resumes_bit_identically(kind: str, tmp_path: Path) -> None:
    make, options, callbacks = KINDS[kind]
    training = Training(make, tmp_path / "run", 1, options=options, callbacks=callbacks)
    assert_resumes(training, training.complete(), KILLS, alone=True)


def test_a_model_checkpoint_beside_it_works(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=1)
    reference = Training(AutoEncoder, tmp_path / "run").complete()
    assert_resumes(Training(AutoEncoder, tmp_path / "run", callbacks=lambda: [best]), reference, [20])
    assert len(list((tmp_path / "best").glob("*.ckpt"))) == 1


@pytest.mark.parametrize("kind", [AutoEncoder, Streaming])
def test_a_finished_training_is_left_alone_and_more_epochs_continue_it(kind: Any, tmp_path: Path) -> None:
    training = Training(kind, tmp_path / "run")
    longer = training.complete(max_epochs=4)
    for path in training.folder.glob("*"):
        path.unlink()
    finished = training.complete()
    saved = (training.folder / "last.ckpt").read_bytes()
    again = training.complete()
    assert [each["weights"] for each in again] == [each["weights"] for each in finished]
    assert [each["metrics"] for each in again] == [each["metrics"] for each in finished]
    assert (training.folder / "last.ckpt").read_bytes() == saved
    assert training.complete(max_epochs=4) == longer


# make soak sends every signal on one rank and on one of two.
SIGNALS = {(signal.SIGTERM, 2), (signal.SIGINT, 1)}


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """The processes of a test do not ignore SIGHUP, as those of `nohup make test` do."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("without_nohup")
@pytest.mark.parametrize(
    ("signum", "world_size"),
    [
        pytest.param(signum, ranks, marks=() if (signum, ranks) in SIGNALS else pytest.mark.slow)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
        for ranks in (1, 2)
    ],
)
def test_a_signal_on_one_rank_saves_on_all_and_ends_with_its_code(
    signum: signal.Signals, world_size: int, tmp_path: Path
) -> None:
    training = Training(AutoEncoder, tmp_path / "run", world_size, every=1000)
    reference = training.complete()
    (training.folder / "last.ckpt").unlink()
    done = training.run(stop=SignalAt(7, signum))
    assert done.code == 128 + signum, done.out + done.err
    assert "cannot store" not in done.out + done.err
    assert done.err.count(f"Stopped by {signum.name} after step ") == 1, done.err
    assert training.complete() == reference


def test_a_stateful_loader_is_asked_for_its_state(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchdata") is None:
        pytest.skip("torchdata is not installed (StatefulDataLoader)")
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Stateful(AutoEncoder):
        def train_dataloader(self) -> Any:
            (tmp_path / "loaded").touch()
            dataset = Counted(INPUTS, TARGETS)
            return StatefulDataLoader(dataset, 6, shuffle=True)

    class Counted(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            with (tmp_path / "loaded").open("a") as file:
                file.write("x")
            return super().__getitem__(index)

    training = Training(Stateful, tmp_path / "run")
    reference = training.complete()
    assert_resumes(training, reference, [3, 9, 15, 16, 31])
    training.run(stop=SignalAt(15, signal.SIGTERM))
    (tmp_path / "loaded").write_text("")
    assert training.complete() == reference
    # The batches before the save are not loaded again.
    assert len((tmp_path / "loaded").read_text()) <= 48 * 6 - 15 * 6


class Iterating(AutoEncoder):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError


class Generated(AutoEncoder):
    def train_dataloader(self) -> Any:
        return (batch for batch in DataLoader(TensorDataset(INPUTS, TARGETS), 6))


class OtherData(AutoEncoder):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS.flip(0), TARGETS), 6, shuffle=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [(Iterating, "training_step(dataloader_iter)"), (Generated, "The train dataloader is a generator")],
)
def test_what_cannot_be_restored_is_rejected_before_training(make: Any, message: str, tmp_path: Path) -> None:
    done = Training(make, tmp_path / "run").run()
    assert done.code == InputError.exit_code, done.err
    assert message in done.err


def test_other_data_are_rejected(tmp_path: Path) -> None:
    training = Training(AutoEncoder, tmp_path / "run")
    training.run(stop=SignalAt(7, signal.SIGTERM))
    done = Training(OtherData, tmp_path / "run").run()
    assert done.code == InputError.exit_code, done.err
    assert "gives a different batch" in done.err


def test_a_checkpoint_of_another_callback_or_world_size_is_rejected(tmp_path: Path) -> None:
    training = Training(AutoEncoder, tmp_path / "run")
    training.complete()
    done = Training(AutoEncoder, tmp_path / "run", 2).run()
    assert done.code == InputError.exit_code, done.err
    assert "saved by 1 rank," in done.err
    checkpoint = torch.load(training.folder / "last.ckpt", weights_only=True)
    del checkpoint["ExactCheckpoint"]
    torch.save(checkpoint, training.folder / "last.ckpt")
    done = training.run()
    assert done.code == InputError.exit_code, done.err
    assert "not saved by ExactCheckpoint" in done.err


class DifferentRates(WithMetrics):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", -float(self.global_rank * self.current_epoch))


def test_learning_rates_that_differ_between_ranks_are_rejected(tmp_path: Path) -> None:
    done = Training(DifferentRates, tmp_path / "run", 2).run()
    assert done.code == InputError.exit_code, done.err
    assert "sync_dist=True" in done.err


def test_workers_that_keep_their_generators_are_warned_of(tmp_path: Path) -> None:
    class Persistent(WithMetrics):
        def train_dataloader(self) -> Any:
            return DataLoader(Augmented(), 6, num_workers=1, persistent_workers=True)

    done = Training(Persistent, tmp_path / "run").run()
    assert done.code == 0, done.err
    assert done.out.count("warning: persistent_workers=True: ExactCheckpoint resumes bit-identically only if") == 1


def test_a_strategy_that_splits_the_state_is_rejected() -> None:
    trainer: Any = SimpleNamespace(callbacks=[], strategy=FSDPStrategy())
    with pytest.raises(InputError, match=r"which FSDPStrategy splits over files. Use strategy=\"ddp\""):
        check_training(trainer, AutoEncoder())


def test_a_second_training_in_the_same_folder_is_rejected_and_changes_nothing(tmp_path: Path) -> None:
    training = Training(AutoEncoder, tmp_path / "run", 2)
    training.complete()
    saved = (training.folder / "last.ckpt").read_bytes()
    with locked(training.folder):
        done = training.run(max_epochs=4)
    assert done.code == InputError.exit_code, done.out + done.err
    # On both ranks.
    assert done.err.count("error: Another training run saves in ") == 2
    assert (training.folder / "last.ckpt").read_bytes() == saved
    training.complete(max_epochs=4)


def test_a_child_of_a_killed_training_does_not_hold_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(InputError, match="Another training run saves in"), locked(tmp_path):
            raise AssertionError
        begun, begins = os.pipe()
        child = os.fork()
        if not child:
            os.write(begins, b"x")
            signal.pause()
        os.read(begun, 1)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_trainer_fits_twice_with_the_same_callback(tmp_path: Path) -> None:
    def work(stop: int | None) -> str:
        pl.seed_everything(1, verbose=False)
        exact, module = ExactCheckpoint(tmp_path / str(stop), 3), AutoEncoder()
        trainer = stock_trainer(1, tmp_path, callbacks=[exact], max_epochs=1, enable_checkpointing=True)
        trainer.fit(module)
        trainer.fit_loop.max_epochs = 3
        if stop is not None:
            trainer.callbacks.insert(0, SignalAt(stop, signal.SIGTERM))  # type: ignore[attr-defined]
            with pytest.raises(SystemExit):
                trainer.fit(module)
            module = AutoEncoder()
            trainer = stock_trainer(1, tmp_path, callbacks=[exact], max_epochs=3, enable_checkpointing=True)
        trainer.fit(module, ckpt_path=exact.last if stop else None, weights_only=True if stop else None)
        return weights_sha256(module.state_dict())

    assert work(20) == work(None)


@pytest.mark.slow
def test_a_compiled_module_resumes_bit_identically(tmp_path: Path) -> None:
    def compiled() -> Any:
        module = AutoEncoder()
        module.encoder = torch.compile(module.encoder, backend="eager")  # type: ignore[assignment]
        return module

    training = Training(compiled, tmp_path / "run")
    assert_resumes(training, training.complete(), [7])


def test_wrong_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="every_n_train_steps"):
        ExactCheckpoint(tmp_path, 0)
    assert ExactCheckpoint(tmp_path).last is None
