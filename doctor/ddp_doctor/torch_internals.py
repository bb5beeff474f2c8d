"""Private parts of torch and Python, each with its test in tests/test_doctor_internals.py.

1. `LoaderIndices`, `watch_workers`: the index lists that a DataLoader's iterator takes, also those that it gives to
   its workers before it is returned. `test_the_indices_of_a_loader_are_seen`.
2. `without_modes`: leaves all dispatch modes. `test_a_dispatch_mode_is_left_for_a_while`.
3. `graph_nodes`: the nodes of an autograd graph. `test_the_nodes_of_a_kept_graph_are_counted`.
4. `in_backward`: whether a backward pass runs. `test_a_backward_pass_is_seen`.
5. `tree_leaves`, `tree_map`: nested batches. `test_nested_batches_are_flattened`.
6. `on_indices`: the index lists and the batches that an iterator takes. `test_indices_and_batches_are_told`.
7. `name_generators`: what names temporary files and semaphores. `test_a_temporary_name_is_drawn_by_no_program`.
8. `ignored_by_ddp`: the names that DistributedDataParallel is told to ignore. `test_what_ddp_ignores_is_known`.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
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


def ignored_by_ddp(module: torch.nn.Module) -> list[str]:
    """Returns the names of parameters and buffers that DistributedDataParallel is told to ignore, such as experts."""
    return sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def tree_map(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """Applies a function to each tensor of a nested batch."""
    return pytree.tree_map_only(torch.Tensor, function, batch)


def name_generators(objects: Iterable[Any]) -> set[int]:
    """Returns the identities of the generators from which Python draws the names of temporary files and semaphores.

    The workers of a DataLoader need such names, even if it is iterated within a step.

    Args:
        objects: The objects of this process.
    """
    kind: Any = tempfile._RandomNameSequence  # type: ignore[attr-defined]
    # A fork does not find objects that were frozen before.
    frozen = [getattr(tempfile, "_name_sequence", None), getattr(SemLock, "_rand", None)]
    return {id(vars(value).get("_rng")) for value in (*objects, *frozen) if type(value) is kind}


def watch_workers() -> None:
    """Lets `LoaderIndices` see the index lists that an iterator gives to its workers when it is made."""
    base: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    original = base._reset

    def reset(iterator: Any, *args: Any, **kwargs: Any) -> None:
        original(iterator, *args, **kwargs)
        if iterator._num_workers and iterator._dataset_kind != torch.utils.data._DatasetKind.Iterable:
            iterator.doctor_lists = []
            iterator._sampler_iter = _watch(iterator._sampler_iter, iterator.doctor_lists)

    base._reset = reset


class LoaderIndices:
    """The index lists that a DataLoader's iterator takes from its sampler.

    Args:
        iterator: What `iter(loader)` of a torch DataLoader returns.

    Attributes:
        lists: The index lists so far; workers are ahead of the loop.
        is_iterable: Whether the data set is an IterableDataset, which has no indices.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.lists: list[list[int]] = []
        self.is_iterable = getattr(iterator, "_dataset_kind", 0) == torch.utils.data._DatasetKind.Iterable
        if hasattr(iterator, "doctor_lists"):
            self.lists = iterator.doctor_lists
        elif not self.is_iterable and getattr(iterator, "_sampler_iter", None) is not None:
            iterator._sampler_iter = _watch(iterator._sampler_iter, self.lists)

    def of_batch(self, number: int) -> list[int]:
        """Returns the indices of a batch, from 0; empty if they are not known."""
        return self.lists[number] if number < len(self.lists) else []

    def drain(self) -> bool:
        """Takes the rest of the epoch from the sampler without loading samples; returns whether it ended."""
        if self.is_iterable:
            return False
        for number, _ in enumerate(getattr(self.iterator, "_sampler_iter", None) or ()):
            if number > _MOST_BATCHES:
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
        indices = original(iterator)
        if iterator._dataset_kind != torch.utils.data._DatasetKind.Iterable:
            taken(iterator, _plain(indices))
        return indices

    def next_given(iterator: Any) -> Any:
        batch = next_batch(iterator)
        given(iterator)
        return batch

    base._next_index, base.__next__ = next_index, next_given


def _watch(sampler: Iterator[Any], lists: list[list[int]]) -> Iterator[Any]:
    iterator = iter(sampler)
    while True:
        try:
            # What a sampler draws is no draw of a step.
            with without_modes():
                indices = next(iterator)
        except StopIteration:
            return
        lists.append(_plain(indices))
        yield indices


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
