"""The number of samples of an optimizer step over all ranks, for a user's dataloaders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler

from lit_mnist.plugins.loader_proxy import unwrapped
from lit_mnist.plugins.sampler import ExactDistributedSampler


def global_batch(trainer: Trainer) -> int | None:
    """Returns the number of samples of an optimizer step over all ranks, or None if it is unknown.

    Args:
        trainer: The Trainer, once it has its train dataloaders.
    """
    sizes = [_size_per_rank(loader, trainer.world_size) for loader in train_loaders(trainer)]
    known = [size for size in sizes if size is not None]
    return sum(known) * trainer.world_size * trainer.accumulate_grad_batches if len(known) == len(sizes) else None


def describe_global_batch(trainer: Trainer) -> str:
    """Returns a line such as `global batch 128 = 2 ranks x 32 (x 2 accumulated)`, or why the number is unknown."""
    sizes: list[int] = []
    for loader in train_loaders(trainer):
        size = _size_per_rank(loader, trainer.world_size)
        if size is None:
            sampler = getattr(loader, "batch_sampler", None)
            return f"global batch unknown: {type(sampler or unwrapped(loader)).__name__} decides the size of each batch"
        sizes.append(size)
    accumulated = trainer.accumulate_grad_batches
    share = " + ".join(map(str, sizes))
    ranks = f"{trainer.world_size} rank{'s' * (trainer.world_size != 1)}"
    further = f" (x {accumulated} accumulated)" if accumulated > 1 else ""
    total = sum(sizes) * trainer.world_size * accumulated
    return f"global batch {total} = {ranks} x {share if len(sizes) == 1 else f'({share})'}{further}"


def train_loaders(trainer: Trainer) -> list[Any]:
    """Returns the train dataloaders of a Trainer, once it has them."""
    return list(_leaves(trainer.train_dataloader))


def _leaves(loaders: Any) -> Iterator[Any]:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        for loader in loaders:
            yield from _leaves(loader)
    else:
        yield loaders


def _size_per_rank(loader: Any, world_size: int) -> int | None:
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, ExactDistributedSampler):
        return sampler.batch_size // world_size
    size = getattr(loader, "batch_size", None)
    # A sampler of the user may have batches of several sizes.
    known = sampler is None or (isinstance(sampler, BatchSampler) and type(sampler).__iter__ is BatchSampler.__iter__)
    size = getattr(sampler, "batch_size", size)
    return size if known and isinstance(size, int) else None
