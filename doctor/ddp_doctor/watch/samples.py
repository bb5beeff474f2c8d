"""Which samples a rank takes, as a sketch: of each epoch a fixed subset, chosen by the number of the sample."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

# One sample in 16 is kept, the same ones on every rank, and so many of an epoch at most.
_PART, _MOST, _FACTOR = 16, 4096, 0x9E3779B1
# Batches by which the order of two epochs is compared.
_ORDER = 4


class Samples:
    """The samples of each epoch of the loaders that a rank trains with.

    Attributes:
        beginning: The epoch whose iterator is being made.
    """

    def __init__(self) -> None:
        self.beginning: Epoch | None = None
        # A loader that the program drops ends with its workers.
        self._epochs: WeakKeyDictionary[Any, tuple[int, list[Epoch]]] = WeakKeyDictionary()
        self._numbers = count()
        self._last: Epoch | None = None

    def begin(self, loader: Any) -> Epoch:
        """Begins an epoch of a loader."""
        _, epochs = self._epochs.setdefault(loader, (next(self._numbers), []))
        sampler = getattr(loader, "sampler", None)
        shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
        shuffles |= isinstance(sampler, DistributedSampler) and sampler.shuffle
        size = 0
        with suppress(TypeError, AttributeError):
            size = len(loader.dataset)
        self.beginning = Epoch(epochs[-1].number + 1 if epochs else 0, size, shuffles=shuffles)
        epochs.append(self.beginning)
        return self.beginning

    def on_indices(self, iterator: Any, indices: list[int]) -> None:
        """Takes the indices that an iterator takes."""
        epoch = self.beginning or getattr(iterator, "watch_epoch", None)
        if epoch is not None:
            epoch.take(indices)

    def on_batch(self, iterator: Any) -> None:
        """Remembers the loader whose batch was taken last."""
        self._last = getattr(iterator, "watch_epoch", None)

    def on_step(self) -> None:
        """Counts an optimizer step for the loader whose batch was taken last."""
        if self._last is not None:
            self._last.steps += 1

    def taken(self) -> dict[str, Any]:
        """Returns what was taken since the last call, for the record: `epochs`, absent if there is nothing new."""
        found = []
        for number, epochs in self._epochs.values():
            # A loader without steps is not trained with.
            news = [(epoch, epoch.news()) for epoch in epochs if epoch.steps > 1]
            found += [{"loader": number, "epoch": epoch.number, **new} for epoch, new in news if new]
            del epochs[:-2]
        return {"epochs": found} if found else {}


class Epoch:
    """What was taken of one epoch.

    Args:
        number: Its number, from 0.
        size: Number of samples of the data set; 0 if that is not known.
        shuffles: Whether another epoch should have another order.
    """

    def __init__(self, number: int, size: int, *, shuffles: bool) -> None:
        self.number, self.size, self.shuffles, self.steps = number, size, shuffles, 0
        self._new: list[int] = []
        self._kept = self._batches = 0
        self._order = hashlib.sha256()

    def take(self, indices: list[int]) -> None:
        """Takes the indices of a batch."""
        self._batches += 1
        if self._batches <= _ORDER:
            self._order.update(repr(indices).encode())
        if self._kept < _MOST:
            # Of a small data set every sample is kept.
            part = 1 if self.size <= _MOST else _PART
            chosen = [index for index in indices if (index * _FACTOR >> 7) % part == 0]
            self._kept += len(chosen)
            self._new += chosen

    def news(self) -> dict[str, Any]:
        """Returns the samples since the last call, and once the order of the epoch; empty without any."""
        found: dict[str, Any] = {"samples": self._new} if self._new else {}
        self._new = []
        if self.shuffles and self._batches >= _ORDER:
            self.shuffles = False
            found["order"] = self._order.hexdigest()[:16]
        return found
