"""Which samples a rank takes, as a sketch: of each epoch a fixed subset, chosen by the number of the sample."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

# At most about so many samples of an epoch are kept, the same ones on every rank.
_KEPT, _FACTOR = 1 << 16, 0x9E3779B1
# Batches by which the order of two epochs is compared.
_ORDER = 4


class Epoch:
    """What was taken of one epoch.

    Args:
        loader: The number of its loader.
        number: Its own number, from 0.
        part: One in so many samples is kept.
        shuffles: Whether another epoch should have another order.

    Attributes:
        steps: Optimizer steps that used its batches.
    """

    def __init__(self, loader: int, number: int, part: int, *, shuffles: bool) -> None:
        self.loader, self.number, self._part, self._shuffles, self.steps = loader, number, part, shuffles, 0
        self._new: list[int] = []
        self._batches, self._order = 0, hashlib.sha256()

    def take(self, indices: list[int]) -> None:
        """Takes the indices of a batch."""
        self._batches += 1
        if self._batches <= _ORDER:
            self._order.update(repr(indices).encode())
        # A product has no pattern that the parts of the ranks could share.
        self._new += [index for index in indices if (index * _FACTOR >> 7) % self._part == 0]

    def news(self) -> dict[str, Any]:
        """Returns the samples since the last call, and the order of the epoch as soon as it is known."""
        order = self._order.hexdigest()[:16] if self._shuffles and self._batches >= _ORDER else ""
        found = {"loader": self.loader, "epoch": self.number, "samples": self._new, "order": order}
        self._new = []
        return found


class Samples:
    """The samples of each epoch of the loaders that a rank trains with."""

    def __init__(self) -> None:
        # A loader that the program drops ends with its workers. The last two epochs of each.
        self._epochs: WeakKeyDictionary[Any, list[Epoch]] = WeakKeyDictionary()
        self._loaders = 0
        self._last: Epoch | None = None

    def begin(self, loader: Any) -> Epoch:
        """Begins an epoch of a loader."""
        sampler = getattr(loader, "sampler", None)
        shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
        shuffles |= isinstance(sampler, DistributedSampler) and sampler.shuffle
        part = 16
        with suppress(TypeError, AttributeError):
            part = 1 + len(loader.dataset) // _KEPT
        if epochs := self._epochs.setdefault(loader, []):
            epoch = Epoch(epochs[-1].loader, epochs[-1].number + 1, part, shuffles=shuffles)
        else:
            epoch = Epoch(self._loaders, 0, part, shuffles=shuffles)
            self._loaders += 1
        epochs[:-1] = []
        epochs.append(epoch)
        return epoch

    def on_batch(self, iterator: Any) -> None:
        """Remembers the epoch whose batch was taken last."""
        self._last = getattr(iterator, "watch_epoch", None)

    def on_step(self) -> None:
        """Counts an optimizer step for the epoch whose batch was taken last."""
        if self._last is not None:
            self._last.steps += 1

    def news(self) -> list[dict[str, Any]]:
        """Returns what was taken since the last call. A loader without steps is not trained with."""
        epochs = [epoch for epochs in self._epochs.values() for epoch in epochs if epoch.steps > 1]
        return [new for epoch in epochs if (new := epoch.news())["samples"]]
