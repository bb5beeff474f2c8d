"""What ExactCheckpoint cannot restore: it is rejected, or a warning names the promise, before the training starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import TensorDataset

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.rank import warn_once
from lit_mnist.errors import InputError, require
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.generators import process_generators
from lit_mnist.plugins.lightning_internals import uses_dataloader_iter
from lit_mnist.plugins.plain_values import NotPlainError, pack

# Callbacks beside which a resumed training run would not end as an uninterrupted one.
_REJECTED = (
    (LearningRateFinder, "it selects a learning rate at each start. Run the Tuner with another Trainer, and set lr"),
    (BatchSizeFinder, "it selects a batch size at each start. Run the Tuner with another Trainer, and set the size"),
    (ModelPruning, "it saves the pruned weights without their masks. Prune after the training"),
)


def check_training(trainer: Trainer, module: LightningModule) -> None:
    """Checks a strategy, a module and the callbacks.

    Raises:
        InputError: They cannot be restored.
    """
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
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REJECTED:
            name = f"{type(callback).__name__} beside ExactCheckpoint"
            require(not isinstance(callback, kind), f"{name} prevents a bit-identical resume, since {reason}.")


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
        "run cannot repeat its batches. Return an object whose __iter__ starts again, such as a DataLoader.",
    )
    require(
        not getattr(loader, "num_workers", 0) or getattr(loader, "in_order", True),
        "The train dataloader has in_order=False, so that the order of its batches depends on the speed of its workers "
        "and cannot be repeated by a resumed training run. Use in_order=True.",
    )
    if getattr(loader, "persistent_workers", False) and not isinstance(loader.dataset, TensorDataset):
        warn_once(
            "persistent_workers=True: ExactCheckpoint resumes bit-identically only if the dataset draws no random "
            "numbers, since workers keep their generators from epoch to epoch. Use persistent_workers=False."
        )


def check_draws_nothing(module: LightningModule, before: bytes) -> None:
    """Warns if a training run whose state is a function of the step has drawn from the generators of the process.

    Args:
        module: The module.
        before: The packed states of the generators before a step.
    """
    if pack(process_generators()) != before:
        warn_once(
            f"{type(module).__name__} has state_is_step = True, but its training step draws random numbers from the "
            "generators of the process, which are not saved: a resumed training run draws others. Draw them from a "
            "generator that is seeded with the step, or remove state_is_step."
        )


def digest_of_rank_0(trainer: Trainer, schedules: list[Any]) -> bytes:
    """Returns the digest of what a checkpoint has of rank 0 only: the schedules with their learning rates, the weights.

    Returns:
        16 bytes of the schedules, and 16 of the weights.
    """
    rates = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
    schedule = hashlib.sha256(pack(rates))
    for state in schedules:
        with suppress(NotPlainError):
            schedule.update(pack(state))
    sums = _sums_of_bits(trainer.lightning_module) if trainer.world_size > 1 else {}
    weights = hashlib.sha256(repr(sums).encode())
    return schedule.digest()[:16] + weights.digest()[:16]


def check_ranks(digests: list[bytes], trainer: Trainer) -> None:
    """Checks that the learning rates, their schedules and the weights of all ranks are equal.

    Args:
        digests: What `digest_of_rank_0` has returned on each rank.
        trainer: The Trainer.

    Raises:
        InputError: They differ; all ranks raise it.
    """
    if len({each[:16] for each in digests}) > 1:
        raise InputError(
            "The learning rates or their schedules differ between the ranks, and a checkpoint has those of rank 0. A "
            "schedule that monitors a metric needs the same value on all ranks: self.log(..., sync_dist=True)."
        )
    if len(set(digests)) > 1:
        sums = all_gather_json(_sums_of_bits(trainer.lightning_module))
        differing = [name for name in sums[0] if any(each.get(name) != sums[0][name] for each in sums)]
        raise InputError(
            f"The weights differ between the ranks, and a checkpoint has those of rank 0: {_shortened(differing)}. DDP "
            "does not average the gradients of parameters that were frozen or missing when the training began, such as "
            "with BackboneFinetuning: let them require gradients from the start, or train on one rank."
        )


def _sums_of_bits(module: LightningModule) -> dict[str, int]:
    """Returns the sum of the bits of each dense parameter, read as integers and added on its device."""
    dense = {name: each for name, each in module.named_parameters() if each.layout is torch.strided}
    return {name: int(_bits(each).sum(dtype=torch.int64)) for name, each in dense.items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().contiguous().view(sizes[tensor.element_size()])


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def default_checkpoint_io(trainer: Trainer) -> CheckpointIO | None:
    """Returns what reads and writes the checkpoints, or None if the Trainer has a CheckpointIO of the user."""
    # In the background the exit after a signal would also have to wait.
    return VerifiedCheckpointIO(background=False) if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO else None
