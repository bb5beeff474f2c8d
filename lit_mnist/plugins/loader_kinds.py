"""What is known of a train dataloader: its length, its state, whether it can seek, and where it draws random numbers.

A dataloader, or the batch sampler of a DataLoader, can seek if it has a method `seek(batch)`: its next iteration begins
with that batch of the epoch, counted from 0. The batches must be a function of the epoch and their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from lit_mnist.plugins.lightning_internals import wrapped_sampler

_INDICES = (list, tuple, range, np.ndarray, Tensor)
_LIBRARIES = ("torch.", "torchdata.", "lightning.", "lit_mnist.", "builtins")


def length_of(loader: Any) -> int | None:
    """Returns the number of batches, or None if it is unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_stateful(value: Any) -> bool:
    """Returns whether an object has a state that can be restored."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def uses_state(loader: Any) -> bool:
    """Returns whether the loader's `state_dict` is used.

    The state of a StatefulDataLoader lacks the generators of its process and of its workers, so that a dataset or
    a sampler that may draw from them has to have a state itself.
    """
    if not is_stateful(loader) or _can_seek(loader):
        return False
    if not isinstance(loader, DataLoader):
        return True
    if isinstance(loader.dataset, IterableDataset):
        return is_stateful(loader.dataset)
    drawn = loader.num_workers and not _reads_tensors(loader) and not is_stateful(loader.dataset)
    return not drawn and _repeats_order(index_sampler(loader))


def index_sampler(loader: Any) -> Any:
    """Returns the sampler whose values a DataLoader passes to its dataset, batch by batch; None for other loaders."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def seekable(loader: Any) -> Any:
    """Returns what has a method `seek`: the loader or its batch sampler. Returns None if neither has one."""
    return next((each for each in (loader, index_sampler(loader)) if _can_seek(each)), None)


def seeks(loader: Any) -> bool:
    """Returns whether the loader is asked to seek to a batch; otherwise, the batches before it are loaded again.

    The generators of worker processes depend on the batches that they have loaded.
    """
    in_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
    drawn = in_workers and not _can_seek(loader) and not _reads_tensors(loader)
    return seekable(loader) is not None and not drawn


def skips(loader: Any) -> bool:
    """Returns whether batches of a DataLoader can be skipped by drawing only their indices.

    Loading a batch must have no effect, which is known of tensors only. Other datasets may draw numbers, or count.
    """
    return (
        type(loader) is DataLoader
        and _has_tensors_only(loader.dataset)
        and loader.collate_fn is default_collate
        and not _changes_workers(loader)
        # Such workers keep the iterator of an earlier epoch.
        and not loader.persistent_workers
    )


def _reads_tensors(loader: Any) -> bool:
    return isinstance(loader.dataset, TensorDataset) and not _changes_workers(loader)


def _changes_workers(loader: Any) -> bool:
    """Returns whether the workers may have different data. A batch must then be loaded by the same worker as before."""
    init = loader.worker_init_fn
    # With `seed_everything(workers=True)`, Lightning seeds the workers.
    module = getattr(getattr(init, "func", init), "__module__", None) or ""
    return init is not None and not module.startswith(_LIBRARIES)


def _has_tensors_only(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return type(dataset.indices) in _INDICES and _has_tensors_only(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_has_tensors_only(each) for each in dataset.datasets)
    return type(dataset) is TensorDataset and all(type(each) is Tensor for each in dataset.tensors)


def loads_here(loader: Any) -> bool:
    """Returns whether the batches are loaded in this process."""
    return not isinstance(loader, DataLoader) or loader.num_workers == 0


def draws_here(loader: Any) -> bool:
    """Returns whether the order may depend on numbers drawn in this process, between which the training draws others.

    The samplers of libraries draw only at the start of an epoch.
    """
    if uses_state(loader) or seeks(loader):
        return False
    if not isinstance(loader, DataLoader):
        return True
    if isinstance(loader.dataset, IterableDataset):
        return loader.num_workers == 0
    # All ranks draw the order that Lightning splits, and only the generators of torch need to be the same.
    return not all(is_of_a_library(each) for each in samplers(loader, splits=False))


def stateful_sampler(loader: Any) -> Any:
    """Returns the sampler of a DataLoader that has a state; that may be one within the batch sampler, or None."""
    return next((each for each in samplers(loader) if is_stateful(each)), None)


def is_of_a_library(sampler: Any) -> bool:
    """Returns whether the class of a sampler is known, and not the user's."""
    return type(sampler).__module__.startswith(_LIBRARIES)


def samplers(loader: Any, *, splits: bool = True) -> list[Any]:
    """Returns the batch sampler of a DataLoader, its sampler, and so on; an empty list for other loaders.

    Args:
        loader: The dataloader.
        splits: Whether a sampler counts that Lightning splits over the ranks.
    """
    found: list[Any] = []
    sampler = index_sampler(loader)
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        inner = wrapped_sampler(sampler) if splits else None
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return found


def _repeats_order(sampler: Any) -> bool:
    """Returns whether a StatefulDataLoader restores the order of a sampler without the generators of the process."""
    if is_stateful(sampler) or _can_seek(sampler):
        return True
    module, name = type(sampler).__module__, type(sampler).__name__
    if name == "BatchSampler" and module.startswith(_LIBRARIES):
        return _repeats_order(sampler.sampler)
    known = {("torch", "SequentialSampler"), ("torch", "DistributedSampler"), ("torchdata", "RandomSampler")}
    return (module.partition(".")[0], name) in known


def _can_seek(value: Any) -> bool:
    return callable(getattr(value, "seek", None))
