"""A training loader whose position can be restored: an interrupted epoch is repeated up to the batch where it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hashlib, random
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.errors import InputError
from lit_mnist.plugins.local_state import (
    find_generators,
    generator_state,
    pack,
    process_generators,
    restore_generator,
    restore_process_generators,
)


class ReplayLoader:
    """Iterates another loader, and knows how to bring a new one to the same position.

    Nothing has to be known of the loader, other than that it is the same function of the random numbers each time:
    the generators are set to their states at the beginning of the epoch, and as many batches as were used are loaded
    again. The seeds of worker processes come from these states, too. A loader with `state_dict` and `load_state_dict`,
    such as torchdata's StatefulDataLoader, is asked for its state instead.

    Args:
        loader: The loader.
        before_fetch: Called before each batch is loaded.
    """

    def __init__(self, loader: Any, before_fetch: Callable[[ReplayLoader], None]) -> None:
        self._loader, self._before_fetch = loader, before_fetch
        self._iterator: Iterator[Any] | None = None
        self._stream: dict[str, Any] | None = None
        self._start: dict[str, Any] = {}
        self._pending: dict[str, Any] | None = None
        # An unsized loader is one batch ahead of the training.
        self._recent: deque[Any] = deque(maxlen=2)
        self.delivered = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "delivered":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> ReplayLoader:
        self.delivered, self._iterator = 0, None
        self._recent.clear()
        if self._pending is None:
            self._begin()
        return self

    def _begin(self) -> None:
        self._start = {"iter": self._generators()}
        self._stream = _stream_of(process_generators()) if self._draws_here else None
        with self._own_stream():
            self._iterator = iter(self._loader)

    @property
    def _draws_here(self) -> bool:
        """Whether an iterator that cannot be asked for its position draws random numbers in this process."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return not self._is_stateful
        return isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Lets the loader draw from random numbers of its own, which the training's draws do not change."""
        if self._stream is None:
            yield
            return
        before = process_generators()
        restore_process_generators(self._stream)
        try:
            yield
        finally:
            self._stream = process_generators()
            restore_process_generators(before)

    def __next__(self) -> Any:
        self._before_fetch(self)
        return self.fetch()

    def fetch(self) -> Any:
        """Returns the next batch."""
        assert self._iterator is not None
        if self.delivered == 0:
            self._start["fetch"] = self._generators()
        self.before_last = process_generators()
        return self._next()

    def _next(self) -> Any:
        assert self._iterator is not None
        with self._own_stream():
            batch = next(self._iterator)
        self._recent.append(batch)
        self.delivered += 1
        return batch

    # Lightning calls a loader that has these resumable; the position is saved per rank by ExactCheckpoint.
    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: `position` has what is needed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def position(self, in_flight: int) -> dict[str, Any]:
        """Returns the position before the next batch as nested plain values and tensors.

        Args:
            in_flight: The number of batches that were loaded, but are not used yet.
        """
        stateful = self._is_stateful and not in_flight and self.delivered
        used = self.delivered - in_flight
        return {
            "start": self._start,
            "used": used,
            "digest": batch_digest(self._recent[-1 - in_flight]) if used else None,
            "state": self._loader.state_dict() if stateful else None,
        }

    def resume(self, position: dict[str, Any]) -> None:
        """Sets the position that the next iteration begins with; `replay` goes there."""
        self._pending = position

    def replay(self) -> None:
        """Goes to the position.

        Raises:
            InputError: The loader does not give the same batches again.
        """
        position, self._pending = self._pending, None
        if position is None:
            return
        start = position["start"]
        if position["state"] is not None:
            self._loader.load_state_dict(position["state"])
            self._iterator = iter(self._loader)
            self._start = start
            self.delivered = position["used"]
            return
        self._set_generators(start["iter"])
        self._begin()
        if "fetch" in start:
            self._set_generators(start["fetch"])
        self._start = start
        for _ in range(position["used"]):
            try:
                self._next()
            except StopIteration:
                raise InputError(_changed("has fewer batches")) from None
        if position["used"] and position["digest"] != batch_digest(self._recent[-1]):
            raise InputError(_changed(f"gives another batch {position['used']}"))

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _generators(self) -> dict[str, Any]:
        own = {path: generator_state(generator) for path, generator in find_generators(self._loader)}
        return {"process": process_generators(), "own": own}

    def _set_generators(self, states: dict[str, Any]) -> None:
        restore_process_generators(states["process"])
        for path, generator in find_generators(self._loader):
            if path in states["own"]:
                restore_generator(generator, states["own"][path])


def _changed(what: str) -> str:
    return (
        f"The training cannot be resumed exactly: the train dataloader {what} than before, although all generators were "
        "restored. Its data have changed, or its dataset has a state of its own: make its batches a function of "
        "random numbers, or give it state_dict and load_state_dict."
    )


def batch_digest(batch: Any) -> str | None:
    """Returns the SHA-256 of the tensors of a batch, or None if it has none."""
    tensors: list[torch.Tensor] = []
    torch.utils._pytree.tree_map_only(torch.Tensor, tensors.append, batch)
    return content_sha256(tensors) if tensors else None


def _stream_of(state: dict[str, Any]) -> dict[str, Any]:
    """Returns generator states that follow from others, but share no random numbers with them."""
    seed = int.from_bytes(hashlib.sha256(pack(state)).digest()[:4], "little")
    before = process_generators()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    stream = process_generators()
    restore_process_generators(before)
    return stream
