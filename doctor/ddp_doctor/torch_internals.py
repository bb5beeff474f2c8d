"""Private parts of torch and Python."""

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.synchronize import SemLock
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_MOST_BATCHES = 200_000
_MOST_NODES = 100_000

without_modes = _disable_current_modes
tree_leaves = pytree.tree_leaves
DispatchMode = TorchDispatchMode


def tree_map(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """Applies a function to each tensor of a nested batch."""
    return pytree.tree_map_only(torch.Tensor, function, batch)


def name_generators(objects: Iterable[Any]) -> set[int]:
    """Returns the identities of the generators from which Python draws the names of temporary files and semaphores.

    The workers of a DataLoader need such names, even if it is iterated within a step.
    """
    kind: Any = tempfile._RandomNameSequence  # type: ignore[attr-defined]
    # A fork does not find objects that were frozen before.
    frozen = [getattr(tempfile, "_name_sequence", None), getattr(SemLock, "_rand", None)]
    return {id(vars(value).get("_rng")) for value in (*objects, *frozen) if type(value) is kind}


def index_lists(iterator: Any) -> list[list[int]]:
    """Returns the index lists that a DataLoader's iterator has taken from its sampler, of which `on_indices` tells.

    Workers are ahead of the loop. With persistent workers, an iterator has several epochs, and these are of the newest.
    An iterator of another class has none.
    """
    if not hasattr(iterator, "_sampler_iter"):
        return []
    known, lists = vars(iterator).get("doctor_lists", (None, []))
    if known is not iterator._sampler_iter:
        lists = []
        iterator.doctor_lists = iterator._sampler_iter, lists
    return lists


def drain(iterator: Any) -> bool:
    """Takes the rest of the epoch from the sampler without loading samples; returns whether it ended."""
    if not hasattr(iterator, "_next_index"):
        return False
    with suppress(StopIteration):
        for _ in range(_MOST_BATCHES):
            iterator._next_index()
        return False
    return True


def on_indices(taken: Callable[[Any, list[int]], None], given: Callable[[Any], None]) -> None:
    """Tells of each index list that a DataLoader's iterator takes, and of each batch that it gives.

    Args:
        taken: Called with the iterator and the indices, for a map-style data set. With workers, the first lists are
            taken before the iterator is returned.
        given: Called with the iterator after each batch.
    """
    base: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    original, next_batch = base._next_index, base.__next__

    def next_index(iterator: Any) -> Any:
        # What a sampler draws is no draw of a step.
        with without_modes():
            indices = original(iterator)
        if iterator._dataset_kind != torch.utils.data._DatasetKind.Iterable:
            taken(iterator, _plain(indices))
        return indices

    def next_given(iterator: Any) -> Any:
        batch = next_batch(iterator)
        given(iterator)
        return batch

    base._next_index, base.__next__ = next_index, next_given


def _plain(indices: Any) -> list[int]:
    try:
        values = indices if isinstance(indices, list | tuple) else [indices]
        return [int(index) for index in values]
    except (TypeError, ValueError):
        return []


def in_backward() -> bool:
    """Returns whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def graph_nodes() -> int:
    """Returns the number of autograd nodes that live tensors keep, up to 100,000."""
    # What waits for the collector is not kept.
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
    stack: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [parent for parent, _ in node.next_functions]
    return len(seen)
