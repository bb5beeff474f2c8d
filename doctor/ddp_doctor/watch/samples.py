"""Which samples a rank takes, as a sketch: of each epoch a fixed subset, chosen by the number of the sample."""

from __future__ import annotations

import hashlib
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from ddp_doctor.torch_internals import on_indices

# One sample in 16 is kept, the same ones on every rank, and so many of an epoch at most.
_PART, _MOST, _FACTOR = 16, 4096, 0x9E3779B1
# Batches by which the order of two epochs is compared.
_ORDER = 4


class SampleSketch:
    """The samples of each epoch of the loaders that a rank trains with."""

    def __init__(self) -> None:
        self._epochs: dict[int, list[_Epoch]] = {}
        self._last: _Epoch | None = None
        self._loaders: list[Any] = []
        self._active = False

    def install(self) -> None:
        """Begins to record."""
        self._active = True
        make = DataLoader.__iter__

        def begin(loader: Any) -> Any:
            iterator = make(loader)
            if self._active:
                self._begin(loader, iterator)
            return iterator

        DataLoader.__iter__ = begin  # type: ignore[method-assign]
        on_indices(self._on_indices, self._on_batch)

    def remove(self) -> None:
        """Records nothing more."""
        self._active = False

    def on_step(self) -> None:
        """Counts an optimizer step for the loader whose batch was taken last."""
        if self._last is not None:
            self._last.steps += 1

    def taken(self) -> dict[str, Any]:
        """Returns what was taken since the last call, for the record: `epochs`, absent if there is nothing new."""
        found = [
            {"loader": number, "epoch": epoch.number, "size": epoch.size, **epoch.news()}
            for number, epochs in self._epochs.items()
            for epoch in epochs
            if epoch.steps > 1 and epoch.has_news
        ]
        for epochs in self._epochs.values():
            del epochs[:-2]
        return {"epochs": found} if found else {}

    def _begin(self, loader: Any, iterator: Any) -> None:
        number = next((place for place, other in enumerate(self._loaders) if other is loader), -1)
        if number < 0:
            number = len(self._loaders)
            self._loaders.append(loader)
        epochs = self._epochs.setdefault(number, [])
        sampler = getattr(loader, "sampler", None)
        shuffles = isinstance(sampler, RandomSampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
        repeats = isinstance(sampler, RandomSampler) and sampler.replacement
        try:
            size = len(loader.dataset)
        except (TypeError, AttributeError):
            size = 0
        epoch = _Epoch(epochs[-1].number + 1 if epochs else 0, size, shuffles=shuffles and not repeats)
        for indices in getattr(iterator, "watch_early", ()):
            epoch.take(indices)
        iterator.watch_epoch = epoch
        epochs.append(epoch)

    def _on_indices(self, iterator: Any, indices: list[int]) -> None:
        epoch = getattr(iterator, "watch_epoch", None)
        if epoch is not None:
            epoch.take(indices)
        elif self._active:
            # Workers get their first batches before the iterator is returned.
            iterator.watch_early = [*getattr(iterator, "watch_early", ()), indices]

    def _on_batch(self, iterator: Any) -> None:
        self._last = getattr(iterator, "watch_epoch", None)


class _Epoch:
    def __init__(self, number: int, size: int, *, shuffles: bool) -> None:
        self.number, self.size, self.shuffles, self.steps, self.count = number, size, shuffles, 0, 0
        self._new: list[int] = []
        self._kept, self._batches, self._reported = 0, 0, False
        self._order = hashlib.sha256()

    @property
    def has_news(self) -> bool:
        return bool(self._new) or (self._batches >= _ORDER and not self._reported)

    def take(self, indices: list[int]) -> None:
        self.count += len(indices)
        if self._batches < _ORDER:
            self._order.update(repr(indices).encode())
        self._batches += 1
        if self._kept < _MOST:
            # Of a small data set every sample is kept.
            part = 1 if self.size <= _MOST else _PART
            chosen = [index for index in indices if (index * _FACTOR >> 7) % part == 0]
            self._kept += len(chosen)
            self._new += chosen

    def news(self) -> dict[str, Any]:
        found: dict[str, Any] = {"samples": self._new, "count": self.count}
        if self.shuffles and self._batches >= _ORDER and not self._reported:
            self._reported = True
            found["order"] = self._order.hexdigest()[:16]
        self._new = []
        return found
