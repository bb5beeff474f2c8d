"""What identifies the batches of a dataloader: the content of their tensors, and the indices of their samples."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.errors import InputError
from lit_mnist.plugins.lightning_internals import tensor_version
from lit_mnist.plugins.loader_kinds import index_sampler
from lit_mnist.plugins.plain_values import NotPlainError, pack


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def versions_of(batch: Any) -> list[int]:
    """Returns how often each tensor of a batch was changed in place."""
    return [tensor_version(tensor) for tensor in tensors_of(batch)]


def digest_of(batch: Any, versions: list[int]) -> str | None:
    """Returns the SHA-256 of the tensors of a batch, or None if it has none, or if they were changed in place.

    Args:
        batch: The batch.
        versions: What `versions_of` returned for it when it was loaded.
    """
    tensors = tensors_of(batch)
    return content_sha256(tensors) if tensors and versions == versions_of(batch) else None


class Loaded(NamedTuple):
    """A batch, and what identifies it."""

    batch: Any
    versions: list[int]
    before: dict[str, Any]  # the generators before it was loaded, if it was loaded in this process
    indices: str | None  # SHA-256 of the indices of its samples, or None if they are unknown
    order: str | None  # SHA-256 of those of all batches of the epoch up to it

    def identity(self) -> dict[str, Any]:
        """Returns what `check_same` compares, as nested plain values and tensors."""
        digest = digest_of(self.batch, self.versions)
        return {"digest": digest, "before": self.before, "indices": self.indices, "order": self.order}


def check_same(found: Loaded, saved: Mapping[str, Any], number: int, *, alone: bool) -> None:
    """Checks that a batch is the one whose `identity` was saved.

    Args:
        found: The batch.
        saved: What `identity` has returned.
        number: How many batches of the epoch were used.
        alone: Whether the batches before it were not loaded again.

    Raises:
        InputError: Its samples, those of the batches before it, or their contents differ.
    """
    known = (found.indices, saved["indices"]) if alone else (found.order, saved["order"])
    if None not in known and known[0] != known[1]:
        raise InputError(
            f"The training cannot be resumed exactly: up to batch {number} of the epoch, the sampler gives other "
            "indices than before, although its generators were restored. Make its order a function of the epoch and of "
            "random numbers that the training does not draw, or give it a method seek(batch), or state_dict and "
            "load_state_dict, which ExactCheckpoint calls."
        )
    digest = digest_of(found.batch, found.versions)
    if None not in (digest, saved["digest"]) and digest != saved["digest"]:
        same = "with the same indices " if None not in known else ""
        raise InputError(changed(f"gives a different batch {number} {same}than before"))


def changed(what: str) -> str:
    """Returns the message about a dataloader whose batches differ."""
    return (
        f"The training cannot be resumed exactly: the train dataloader {what}, although all generators were restored. "
        "Its data have changed, its dataset has a state of its own, its workers keep their generators "
        "(persistent_workers=True), or something else has moved its position. Make its batches a function of the index "
        "and of random numbers, or give the loader a method seek(batch), or state_dict and load_state_dict."
    )


class IndexRecord:
    """Records which indices the sampler of a DataLoader gives in an iteration, including batches loaded in advance.

    Attributes:
        order: SHA-256 of the indices of all batches that `next` has returned, or None if some are unknown.
    """

    def __init__(self) -> None:
        self._given: deque[str | None] = deque()
        self._skip = 0
        self.order: str | None = ""

    @contextmanager
    def watch(self, loader: Any, skip: int = 0) -> Iterator[None]:
        """Records the indices of the iterator that is created within the body.

        Args:
            loader: The DataLoader.
            skip: Number of batches at the start of the iteration whose indices are recorded, but not loaded.
        """
        self._given.clear()
        self.order, self._skip = "", skip
        sampler = index_sampler(loader)
        if sampler is None:
            yield
            return
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # A DataLoader rejects the assignment of another sampler. Its iterator keeps the one that it was created with.
        vars(loader)[name] = _Watched(sampler, self._given, skip)
        try:
            yield
        finally:
            vars(loader)[name] = sampler

    def next(self) -> str | None:
        """Returns the SHA-256 of the indices of the next batch, or None if they are unknown."""
        skip, self._skip = self._skip, 0
        for _ in range(skip):
            self._advance()
        return self._advance()

    def _advance(self) -> str | None:
        indices = self._given.popleft() if self._given else None
        known = None not in (indices, self.order)
        self.order = hashlib.sha256(f"{self.order} {indices}".encode()).hexdigest() if known else None
        return indices


class _Watched:
    """A sampler that records what it gives, except that its first iteration records the first `skip` values only."""

    def __init__(self, sampler: Any, given: deque[str | None], skip: int) -> None:
        self._sampler, self._given, self._skip = sampler, given, skip

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # Persistent workers keep this object for all epochs.
        self._given.clear()
        # Not in the generator, which would draw the order only with the first batch.
        return self._record(iter(self._sampler))

    def _record(self, iterator: Iterator[Any]) -> Iterator[Any]:
        # A DataLoader with workers creates an iterator that it does not use.
        skip, self._skip = self._skip, 0
        for number, indices in enumerate(iterator):
            self._given.append(_digest_of_indices(indices))
            if number >= skip:
                yield indices


def _digest_of_indices(indices: Any) -> str | None:
    try:
        return hashlib.sha256(pack(indices)).hexdigest()
    except NotPlainError:
        return None
