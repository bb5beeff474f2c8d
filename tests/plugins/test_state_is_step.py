"""A training whose state is a function of the step resumes on any number of ranks, under a stock Trainer."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import Program, result_of
from killed_runs import SignalAt, Training, assert_resumes
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.distributed.ddp_arguments import DDP_OPTIONS
from lit_mnist.module import LitClassifier
from lit_mnist.plugins import ExactDistributedSampler, Float16OnCPU, PortableSyncBatchNorm

pytestmark = pytest.mark.timeout(240)

_FIXED = torch.Generator().manual_seed(0)
INPUTS = torch.randn(96, 16, generator=_FIXED, dtype=torch.float64)
TARGETS = torch.randint(0, 4, (96,), generator=_FIXED)
GLOBAL_BATCH = 12


class Batches:
    """A user's own loader: the batches of this rank are a function of the epoch and their number."""

    def __init__(self) -> None:
        self.epoch, self.first = 0, 0

    @property
    def sampler(self) -> Batches:
        """This object, whose `set_epoch` Lightning calls."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def seek(self, batch: int) -> None:
        self.first = batch

    def __len__(self) -> int:
        return len(INPUTS) // GLOBAL_BATCH

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        order = torch.randperm(len(INPUTS), generator=torch.Generator().manual_seed(self.epoch))
        first, self.first = self.first, 0
        for number in range(first, len(self)):
            chosen = order[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH].chunk(ranks)[rank]
            yield INPUTS[chosen], TARGETS[chosen], chosen


class Declared(LightningModule):
    """A user's module: its noise is a function of the step and the sample."""

    state_is_step = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch[:2]
        if len(batch) > 2:
            noise = torch.Generator().manual_seed(self.trainer.fit_loop.total_batch_idx)
            inputs = inputs + 0.1 * torch.randn(INPUTS.shape, generator=noise, dtype=torch.float64)[batch[2]]
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, targets)
        self.accuracy.update(logits, targets)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("highest", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def train_dataloader(self) -> Any:
        return Batches()


class WithSampler(Declared):
    """The recipe with the plugin's sampler and loader workers."""

    def train_dataloader(self) -> Any:
        sampler = ExactDistributedSampler(len(INPUTS), GLOBAL_BATCH, seed=3)
        return DataLoader(TensorDataset(INPUTS, TARGETS), batch_sampler=sampler, num_workers=1)


class WithDropout(Declared):
    """Declares what is not true."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Dropout(0.5))


class WithPlainLoader(Declared):
    """Declares it of the module only."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 6, shuffle=True)


def _data() -> MNISTDataModule:
    return MNISTDataModule(batch_size=GLOBAL_BATCH, train_size=120, val_size=30, augment="affine")


def _stop_early() -> list[Any]:
    return [EarlyStopping("val_loss", patience=3)]


def _classifier(folder: Path, **options: Any) -> Training:
    """LitClassifier and MNISTDataModule on two ranks, in double precision; an epoch has 10 batches."""
    settings = {"precision": "64-true", "plugins": [PortableSyncBatchNorm()], "num_sanity_val_steps": 0, **options}
    return Training(LitClassifier, folder, 2, 1, settings, _stop_early, _data)


def _user(folder: Path, make: Any = Declared, **options: Any) -> Training:
    """A user's module and loader on two ranks; an epoch has 8 batches."""
    settings = {"precision": "64-true", "use_distributed_sampler": False, **options}
    return Training(make, folder, 2, 1, settings)


def _clear(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()


def _saved(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "last.ckpt", weights_only=True)


def _difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    assert one["state_dict"].keys() == two["state_dict"].keys()
    return max(
        float((value.double() - two["state_dict"][name].double()).abs().max())
        for name, value in one["state_dict"].items()
    )


def _assert_resumes_on_any_number(training: Training, kill: int, metrics: list[str]) -> None:
    """Kills a training, resumes it on other numbers of ranks, and compares with the uninterrupted one."""
    expected = training.complete()[0]
    reference = _saved(training.folder)
    for ranks in (1, 2, 3) if training.world_size == 2 else (3,):
        _clear(training.folder)
        training.run(stop=SignalAt(kill, signal.SIGKILL))
        assert _saved(training.folder)["global_step"] < reference["global_step"]
        found = replace(training, world_size=ranks).complete()[0]
        assert _difference(_saved(training.folder), reference) <= 1e-8, ranks
        assert (found["step"], found["epoch"]) == (expected["step"], expected["epoch"])
        for name in metrics:
            assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-6), (name, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "alone"),
    [
        pytest.param(1, True, id="1", marks=pytest.mark.slow),
        pytest.param(4, False, id="4"),
        pytest.param(4, True, id="4, each kill alone", marks=pytest.mark.slow),
    ],
)
def test_the_project_s_module_resumes_bit_identically(accumulate: int, alone: bool, tmp_path: Path) -> None:
    """Killed at the first, a middle and the last step of an epoch, and within an accumulation window."""
    training = _classifier(tmp_path / "run", accumulate_grad_batches=accumulate)
    assert_resumes(training, training.complete(), [10, 15, 19], alone=alone)
    assert "ranks" not in _saved(training.folder)["ExactCheckpoint"]


@pytest.mark.slow
def test_the_project_s_module_resumes_bit_identically_in_float16(tmp_path: Path) -> None:
    """The scale, and the steps that were skipped, are those of the uninterrupted training."""
    plugins = [Float16OnCPU(init_scale=2.0**19), PortableSyncBatchNorm()]
    training = replace(_classifier(tmp_path / "run"), options={"plugins": plugins, "max_epochs": 2})
    assert_resumes(training, training.complete(), [3, 8], alone=True)


@pytest.mark.slow
def test_the_project_s_module_resumes_on_any_number_of_ranks(tmp_path: Path) -> None:
    training = _classifier(tmp_path / "run", accumulate_grad_batches=4)
    _assert_resumes_on_any_number(training, 17, ["val_loss", "val_accuracy"])


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        pytest.param(Declared, False, id="Declared"),
        pytest.param(Declared, True, id="Declared, each kill alone", marks=pytest.mark.slow),
        pytest.param(WithSampler, True, id="WithSampler", marks=pytest.mark.slow),
    ],
)
def test_a_user_s_module_resumes_bit_identically(make: Any, alone: bool, tmp_path: Path) -> None:
    training = _user(tmp_path / "run", make, accumulate_grad_batches=3)
    assert_resumes(training, training.complete(), [8, 12, 15], alone=alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "world_size"),
    [
        (Declared, 2),
        pytest.param(WithSampler, 2, marks=pytest.mark.slow),
        pytest.param(Declared, 1, marks=pytest.mark.slow),
    ],
)
def test_a_user_s_module_resumes_on_any_number_of_ranks(make: Any, world_size: int, tmp_path: Path) -> None:
    """The epoch in which it was killed has the sums that it would have had."""
    training = replace(_user(tmp_path / "run", make, max_epochs=2), world_size=world_size)
    _assert_resumes_on_any_number(training, 13, ["loss_epoch", "accuracy", "highest"])


@pytest.mark.parametrize("options", [{"reload_dataloaders_every_n_epochs": 1}, {"limit_train_batches": 5}])
def test_a_training_that_has_ended_continues_with_more_epochs(options: dict[str, Any], tmp_path: Path) -> None:
    training = replace(_user(tmp_path / "run", **options), world_size=1)
    longer = training.complete(max_epochs=4)
    _clear(training.folder)
    finished = training.complete(max_epochs=2)
    assert training.complete(max_epochs=2)[0]["weights"] == finished[0]["weights"]
    assert training.complete(max_epochs=4) == longer


@pytest.mark.slow
def test_a_checkpoint_of_raw_ddp_resumes_bit_identically(program: Program, tmp_path: Path) -> None:
    """It has no entry of ExactCheckpoint. Saved within an epoch, at its end, and in the next one."""
    flags: dict[str, Any] = {"--data.train_size": 120, "--data.val_size": 30, "--data.augment": "affine"}
    flags |= {"--batch-size": GLOBAL_BATCH, "--trainer.accumulate_grad_batches": 4, "--epochs": 2, "--devices": 2}
    flags |= {"--precision": "64-true", "--run.threads": 1, "--save-every": 1, "--keep": 9}
    raw = program.train(*[word for pair in flags.items() for word in pair], engine="raw_ddp")
    training = replace(_classifier(tmp_path / "run", accumulate_grad_batches=4, max_epochs=2), strategy=_ddp())
    for step in (2, 3, 4):
        training.folder.mkdir(exist_ok=True)
        _clear(training.folder)
        shutil.copy(raw / "checkpoints" / f"step-{step:08d}.ckpt", training.folder / "last.ckpt")
        assert "ExactCheckpoint" not in _saved(training.folder)
        assert training.complete()[0]["step"] == 6
        weights = {name.removeprefix("net."): value for name, value in _saved(training.folder)["state_dict"].items()}
        assert weights_sha256(weights) == result_of(raw)["weights_sha256"], step


def _ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo", **DDP_OPTIONS)


def test_a_module_that_draws_random_numbers_is_warned_of(tmp_path: Path) -> None:
    done = _user(tmp_path / "run", WithDropout, max_epochs=1).run()
    assert "WithDropout has state_is_step = True, but its training step draws random numbers" in done.out
    _clear(tmp_path / "run")
    assert "draws random numbers" not in _user(tmp_path / "run", max_epochs=1).run().out
    _clear(tmp_path / "run")
    assert "draws random numbers" not in replace(_classifier(tmp_path / "run"), options={"max_epochs": 1}).run().out


def test_a_loader_that_cannot_seek_keeps_the_state_of_each_rank(tmp_path: Path) -> None:
    training = _user(tmp_path / "run", WithPlainLoader, max_epochs=1)
    done = training.run()
    assert (
        "state_is_step = True has no effect, because the train dataloader, a DataLoader, has no method seek" in done.out
    )
    assert len(_saved(training.folder)["ExactCheckpoint"]["ranks"]) == 2
    other = replace(training, world_size=1).run()
    assert other.code == 2
    assert "was saved by 2 ranks" in other.err
