"""What ExactCheckpoint cannot restore: it is rejected, or a warning names the promise, before the training starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import TensorDataset

from lit_mnist.distributed.rank import warn_once
from lit_mnist.errors import InputError, require
from lit_mnist.plugins._private import uses_dataloader_iter
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.plain_values import NotPlainError, pack


def check_training(trainer: Trainer, module: LightningModule) -> None:
    """Checks a strategy, the callbacks and a module.

    Raises:
        InputError: They cannot be restored.
    """
    finders = [each for each in trainer.callbacks if isinstance(each, BatchSizeFinder | LearningRateFinder)]  # type: ignore[attr-defined]
    require(
        not finders,
        f"{type(finders[0]).__name__ if finders else ''} trains, and restores its own checkpoint, before the training "
        "begins, which ExactCheckpoint cannot repeat on resume. Run it with a Trainer without ExactCheckpoint, and set "
        "the value that it finds.",
    )
    require(
        isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy),
        f"ExactCheckpoint saves one file with the state of all ranks, which {type(trainer.strategy).__name__} splits "
        'over files. Use strategy="ddp".',
    )
    require(
        not uses_dataloader_iter(module),
        "ExactCheckpoint cannot restore a training_step(dataloader_iter): it is not known how many batches that has "
        "taken. Use training_step(batch, batch_idx).",
    )


def check_loader(loader: Any) -> None:
    """Checks a train dataloader.

    Raises:
        InputError: It is an iterator that can be iterated only once, or its order depends on the speed of its workers.
    """
    kind = type(loader)
    once = isinstance(loader, Iterator) and kind.__module__ in {"builtins", "itertools"}
    require(
        not once,
        f"The train dataloader is a {kind.__name__}, which can be iterated only once, so that a resumed training "
        "cannot repeat its batches. Return an object whose __iter__ starts again, such as a DataLoader.",
    )
    require(
        not getattr(loader, "num_workers", 0) or getattr(loader, "in_order", True),
        "The train dataloader has in_order=False, so that the order of its batches depends on the speed of its workers "
        "and cannot be repeated by a resumed training. Use in_order=True.",
    )
    if getattr(loader, "persistent_workers", False) and not isinstance(loader.dataset, TensorDataset):
        warn_once(
            "persistent_workers=True: ExactCheckpoint resumes bit-identically only if the dataset draws no random "
            "numbers, since workers keep their generators from epoch to epoch. Use persistent_workers=False."
        )


def digest_of_schedules(trainer: Trainer, states: list[Any]) -> bytes:
    """Returns the SHA-256 of the learning rates, and of the plain states of their schedules."""
    rates = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    digest = hashlib.sha256(pack(rates))
    for state in states:
        with suppress(NotPlainError):
            digest.update(pack(state))
    return digest.digest()


def check_schedules(digests: list[bytes]) -> None:
    """Checks that the learning rates and the schedules of all ranks are equal.

    Raises:
        InputError: They differ; all ranks raise it.
    """
    if len(set(digests)) > 1:
        raise InputError(
            "The learning rates or their schedules differ between the ranks, and a checkpoint has those of rank 0. A "
            "schedule that monitors a metric needs the same value on all ranks: self.log(..., sync_dist=True)."
        )


def default_checkpoint_io(trainer: Trainer) -> CheckpointIO | None:
    """Returns what reads and writes the checkpoints, or None if the Trainer has a CheckpointIO of the user."""
    # In the background the exit after a signal would have to wait, too.
    return VerifiedCheckpointIO(background=False) if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO else None
