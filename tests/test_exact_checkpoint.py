"""A run that is killed and resumed ends with the weights of an uninterrupted one."""

import logging
import multiprocessing
import os
import random
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.errors import InputError
from lit_mnist.module import LitClassifier
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint, ResumableDataLoader
from lit_mnist.plugins.sampler import ExactDistributedSampler

pytestmark = pytest.mark.timeout(120)


# --- three modules of others


class Noisy(Dataset):
    """Draws from three generators, as augmentations do."""

    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(8) + float(np.random.rand()) + random.random()
        return self.inputs[index] + 0.1 * noise, index % 4


class Gan(LightningModule):
    """Manual optimization of two networks, with noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        generator, discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(batch[0]), 4))
        loss = F.softplus(-self.discriminator(batch[0])).mean() + F.softplus(self.discriminator(fake.detach())).mean()
        discriminator.zero_grad()
        self.manual_backward(loss)
        discriminator.step()
        if batch_idx % 2:
            generator.zero_grad()
            self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
            generator.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters(), 0.01), torch.optim.Adam(
            self.discriminator.parameters(), 0.01
        )


class Scheduled(LightningModule):
    """A schedule over the steps, accumulation, clipping, dropout, batch norm, and augmentation in workers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps), "interval": "step"}
        ]


class Pairs(LightningDataModule):
    """Two loaders of different lengths, one with a generator of its own, and one with weights."""

    def train_dataloader(self):
        short = WeightedRandomSampler(torch.arange(1, 50.0), 49, generator=torch.Generator().manual_seed(2))
        return {
            "long": ResumableDataLoader(Noisy(83), 8, shuffle=True, generator=torch.Generator().manual_seed(1)),
            "short": ResumableDataLoader(Noisy(49), 8, sampler=short),
        }

    def val_dataloader(self):
        return DataLoader(Noisy(40), 8, shuffle=True)


class Plateau(LightningModule):
    """Several loaders, and a learning rate that follows the validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        return sum(F.cross_entropy(self.net(inputs), targets) for inputs, targets in batch.values())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", -F.cross_entropy(self.net(batch[0]), batch[1]))  # never improves

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def gan(**options: Any) -> tuple[Any, ...]:
    return Gan(), {"train_dataloaders": ResumableDataLoader(Noisy(80), 8, shuffle=True)}, options


def scheduled(workers: int = 2, **options: Any) -> tuple[Any, ...]:
    loaders = {
        "train_dataloaders": ResumableDataLoader(Noisy(83), 4, shuffle=True, num_workers=workers),
        "val_dataloaders": DataLoader(Noisy(24), 8, shuffle=True),
    }
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "val_check_interval": 0.4, **options}
    return Scheduled(), loaders, options


def pairs(**options: Any) -> tuple[Any, ...]:
    return Plateau(), {"datamodule": Pairs()}, options


def mnist(workers: int = 0, **options: Any) -> tuple[Any, ...]:
    data = MNISTDataModule(batch_size=20, val_size=50, num_workers=workers, augment="shift")
    options = {"limit_train_batches": 6, "use_distributed_sampler": False, **options}
    return LitClassifier(lr=0.05), {"datamodule": data}, options


# --- one training


class Kill(Callback):
    """Kills its process as a machine does."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.fit_loop.total_batch_idx >= self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    setting: Callable[..., Any],
    folder: Path,
    kill: int | None = None,
    every: int = 3,
    resume: Any = "last",
    **options: Any,
) -> dict[str, Any]:
    """Trains under a stock Trainer, and returns its weights and the states of its optimizers."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    multiprocessing.set_start_method("fork", force=True)  # of workers; a process of the fork server would use it again
    torch.set_num_threads(1)
    seed_everything(1)
    module, data, options = setting(**options)
    checkpoint = ExactCheckpoint(folder, every_n_train_steps=every)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[VerifiedCheckpointIO()],
        callbacks=[checkpoint, *([] if kill is None else [Kill(kill)]), *options.pop("callbacks", [])],
        **{"max_epochs": 3, "devices": int(os.environ["WORLD_SIZE"]), **options},
    )
    trainer.fit(module, **data, ckpt_path=checkpoint.last if resume == "last" else resume)
    return {
        "weights": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
    }


def assert_equal(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def killed(ranks: Any, folder: Path, kill: int, setting: Callable[..., Any], count: int = 1, **options: Any) -> None:
    with pytest.raises(AssertionError, match="-9"):
        ranks(count, partial(train, setting, folder, kill, **options))


def trained(ranks: Any, folder: Path, setting: Callable[..., Any], count: int = 1, **options: Any) -> dict[str, Any]:
    return ranks(count, partial(train, setting, folder, **options))[0]


def rejection(ranks: Any, folder: Path, setting: Callable[..., Any], **options: Any) -> str:
    return ranks(1, partial(rejection_in_rank, setting, folder, **options))[0]


def rejection_in_rank(setting: Callable[..., Any], folder: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        train(setting, folder, kill=0, **options)  # a step would kill it
    return str(caught.value)


# --- loaders that cannot always continue


def plain(workers: int = 2, **options: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Noisy(80), 8, shuffle=True, num_workers=workers, generator=generator)
    return Gan(), {"train_dataloaders": loader}, options


def stateful(module: type = Gan, **options: Any) -> tuple[Any, ...]:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = torchdata.StatefulDataLoader(TensorDataset(Noisy(80).inputs, torch.arange(80) % 4), 8, shuffle=True)
    return module(), {"train_dataloaders": loader}, options


class Linear(Scheduled):
    """Without dropout and batch norm, which differ between numbers of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def seekable(**options: Any) -> tuple[Any, ...]:
    data = TensorDataset(Noisy(80).inputs.double(), torch.arange(80) % 4)
    loader = DataLoader(data, batch_sampler=ExactDistributedSampler(data, 8, seed=1))
    options = {"use_distributed_sampler": False, "strategy": "ddp", "precision": "64-true", **options}
    return Linear(), {"train_dataloaders": loader}, options


class Stream(IterableDataset):
    def __iter__(self):
        yield from Noisy(80)


def stream(**options: Any) -> tuple[Any, ...]:
    return Gan(), {"train_dataloaders": ResumableDataLoader(Stream(), 8)}, options


def persistent(**options: Any) -> tuple[Any, ...]:
    loader = ResumableDataLoader(Noisy(80), 8, num_workers=1, persistent_workers=True)
    return Gan(), {"train_dataloaders": loader}, options


# --- the promises

# Indices of batches: the first, one in the middle and the last of an epoch of 10, 21, 11 and 6 batches.
EPOCHS = {gan: (10, 14, 19), scheduled: (22, 31, 41), pairs: (11, 16, 21), mnist: (6, 9, 11)}


@pytest.mark.parametrize(
    ("setting", "options"),
    # With workers, the position of the data module is needed.
    [(gan, {"max_steps": 40, "max_epochs": -1}), (scheduled, {}), (pairs, {}), (mnist, {"workers": 1})],
)
def test_killed_and_resumed(ranks, tmp_path, setting, options) -> None:
    uninterrupted = trained(ranks, tmp_path / "whole", setting, **options)
    for kill in EPOCHS[setting]:
        killed(ranks, tmp_path / f"{kill}", kill, setting, **options)
        assert_equal(trained(ranks, tmp_path / f"{kill}", setting, **options), uninterrupted)
        assert os.listdir(tmp_path / f"{kill}") == ["last.ckpt"]


@pytest.mark.parametrize(
    ("setting", "options", "kill"),
    # With workers, a stock Trainer resumes at the end of an epoch with the order of the first one.
    [(scheduled, {"workers": 0}, 19), (plain, {"workers": 1, "every": 1000}, 14)],
)
def test_killed_and_resumed_on_two_ranks(ranks, tmp_path, setting, options, kill) -> None:
    options = {"strategy": "ddp_find_unused_parameters_true", **options}
    uninterrupted = trained(ranks, tmp_path / "whole", setting, 2, **options)
    killed(ranks, tmp_path / "killed", kill, setting, 2, **options)
    assert "2 ranks" in rejection(ranks, tmp_path / "killed", setting, workers=0)
    assert_equal(trained(ranks, tmp_path / "killed", setting, 2, **options), uninterrupted)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_number_of_ranks_changes(ranks, tmp_path, before, after) -> None:
    uninterrupted = trained(ranks, tmp_path / "whole", seekable, before)
    killed(ranks, tmp_path / "killed", 14, seekable, before)
    resumed = trained(ranks, tmp_path / "killed", seekable, after)
    torch.testing.assert_close(resumed["weights"], uninterrupted["weights"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("setting", [plain, stateful, stream])
def test_other_loaders(ranks, tmp_path, setting) -> None:
    """A loader of torch and a stream continue at the end of an epoch, and a stateful loader within it."""
    every = 3 if setting is stateful else 1000
    uninterrupted = trained(ranks, tmp_path / "whole", setting, every=every)
    killed(ranks, tmp_path / "killed", 14, setting, every=every)
    assert_equal(trained(ranks, tmp_path / "killed", setting, every=every), uninterrupted)


@pytest.mark.parametrize(
    ("setting", "options"), [(plain, {}), (plain, {"workers": 0}), (stream, {}), (stateful, {"module": Scheduled})]
)
def test_rejected_in_mid_epoch(ranks, tmp_path, setting, options) -> None:
    killed(ranks, tmp_path / "killed", 14, setting, **options)
    assert "epoch" in rejection(ranks, tmp_path / "killed", setting, **options)


def test_rejected_otherwise(ranks, tmp_path) -> None:
    assert "persistent" in rejection(ranks, tmp_path, persistent)
    trained(ranks, tmp_path, gan, max_epochs=1)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del checkpoint["exact_checkpoint"]
    torch.save(checkpoint, tmp_path / "last.ckpt")
    assert "without ExactCheckpoint" in rejection(ranks, tmp_path, gan)


def with_others(folder: Path, **options: Any) -> tuple[Any, ...]:
    every_step = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=4)
    every_epoch = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=-1)
    return pairs(callbacks=[every_step, every_epoch, EarlyStopping("val_loss", patience=100)], **options)


def test_checkpoints_of_others(ranks, tmp_path) -> None:
    setting = partial(with_others, tmp_path / "others")
    uninterrupted = trained(ranks, tmp_path / "whole", setting, resume=None)
    for name in ("step=16.ckpt", "epoch=1.ckpt"):
        resumed = trained(ranks, tmp_path / name, setting, resume=tmp_path / "others" / name)
        assert_equal(resumed, uninterrupted)


class Counting(Gan):
    """Forgets an attribute, and changes others that are no state."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.outputs, self.name = 0, [], "constant"

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.outputs.append(self.count)
        self.outputs.clear()
        return super().training_step(batch, batch_idx)


def counting(**options: Any) -> tuple[Any, ...]:
    return Counting(), gan()[1], options


def warned(setting: Callable[..., Any], folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(setting, folder)
    return [str(each.message) for each in caught if "changed in the training" in str(each.message)]


@pytest.mark.parametrize(("setting", "count"), [(counting, 1), (gan, 0), (mnist, 0)])
def test_forgotten_attributes_are_named_once(ranks, tmp_path, setting, count) -> None:
    messages = ranks(1, warned, setting, tmp_path)[0]
    assert len(messages) == count
    assert all("Counting.count" in each and "outputs" not in each and "name" not in each for each in messages)


MATRIX = [
    (gan, {}),
    (gan, {"every": 1, "limit_train_batches": 7}),
    (scheduled, {"workers": 0}),
    (scheduled, {"every": 1, "max_steps": 30, "max_epochs": -1, "workers": 0}),
    (scheduled, {"check_val_every_n_epoch": None, "val_check_interval": 5, "workers": 0}),
    (pairs, {"every": 1}),
    (pairs, {"max_steps": 30, "max_epochs": -1}),
    (mnist, {}),
    (mnist, {"workers": 2}),
]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("setting", "options"), MATRIX)
def test_killed_at_every_batch(ranks, tmp_path, setting, options) -> None:
    uninterrupted = trained(ranks, tmp_path / "whole", setting, **options)
    for kill in range(2, 18):
        killed(ranks, tmp_path / f"{kill}", kill, setting, **options)
        assert_equal(trained(ranks, tmp_path / f"{kill}", setting, **options), uninterrupted)
