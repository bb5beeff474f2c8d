"""Evaluation loaders that give each sample to exactly one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lit_mnist.plugins.evaluation.lightning_internals import copied_loader, predicted_loader, wrap_prepare_loader
from lit_mnist.plugins.loader_kinds import index_sampler
from lit_mnist.plugins.sampler import ExactDistributedSampler


class KnownLoaders(WeakKeyDictionary[Any, int | str]):
    """The number of samples of each loader, or why they are not split exactly.

    A process that `ddp_spawn` starts has other loaders.
    """

    def __reduce__(self) -> tuple[type[KnownLoaders], tuple[()]]:
        return KnownLoaders, ()


def exact_loader(loader: DataLoader[Any], trainer: Trainer) -> DataLoader[Any]:
    """Returns a copy of a loader that gives this rank its part of the samples, without padding.

    The batch size of a rank, the order of the samples, and everything else are those of the loader. A rank may have a
    batch less than the others, or none.

    Args:
        loader: A loader for which `inexact_loader` returns None.
        trainer: The Trainer, whose ranks share the samples.
    """
    if isinstance(loader.batch_sampler, ExactDistributedSampler):
        return loader
    assert loader.batch_size is not None
    batches = ExactDistributedSampler(
        loader.dataset,  # type: ignore[arg-type]
        loader.batch_size * trainer.world_size,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        evaluation=True,
    )
    return copied_loader(loader, batches)


def inexact_loader(loader: object, trainer: Trainer) -> str | None:
    """Returns why the samples of a loader cannot be split exactly, with the fix, or None.

    A loader of any class that gives each sample to exactly one rank says so by an attribute: `splits_exactly = True`.
    """
    if getattr(loader, "splits_exactly", False):
        return None
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} is evaluated as it is on each rank: use a DataLoader, or set splits_exactly"
    if isinstance(loader.batch_sampler, ExactDistributedSampler) and loader.batch_sampler.evaluation:
        return None
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset is split by its own code only: use a map-style data set"
    if loader.batch_sampler is None:
        return "batch_size=None: set a batch size"
    if type(loader.batch_sampler) is not BatchSampler:
        name = type(loader.batch_sampler).__name__
        return f"the {name} of the loader decides what each rank evaluates: use ExactDistributedSampler"
    if isinstance(loader.sampler, RandomSampler):
        return "the loader shuffles, and its samples are padded: set shuffle=False"
    if type(loader.sampler) is not SequentialSampler:
        return f"the {type(loader.sampler).__name__} of the loader is padded: remove it"
    if loader.drop_last:
        return "each rank drops its last batch: set drop_last=False"
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        return "overfit_batches limits the batches of each rank"
    if not isinstance(trainer.strategy, DDPStrategy):
        return f"{type(trainer.strategy).__name__} needs equal numbers of batches, so samples are padded: use DDP"
    return None


def accept_loaders(trainer: Trainer) -> None:
    """Makes a Trainer accept loaders that Lightning cannot construct again: with an exact sampler, or of a subclass."""
    wrap_prepare_loader(trainer, partial(_prepare, trainer))


def _prepare(trainer: Trainer, stock: Callable[[], object], loader: Any, stage: RunningStage) -> object:
    if stage is RunningStage.TRAINING and isinstance(index_sampler(loader), ExactDistributedSampler):
        # It already splits the batches over the ranks.
        return loader
    try:
        return stock()
    except (MisconfigurationException, TypeError):
        if stage is not RunningStage.PREDICTING or type(loader.batch_sampler) is not BatchSampler:
            raise
        return predicted_loader(loader, trainer)
