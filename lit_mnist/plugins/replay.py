"""A dataloader whose position can be restored: an interrupted epoch is repeated up to the batch where it ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_mnist.errors import InputError
from lit_mnist.plugins.batch_digest import digest_of, versions_of
from lit_mnist.plugins.generators import (
    RandomStream,
    own_generators,
    process_generators,
    restore_own_generators,
    restore_process_generators,
)
from lit_mnist.plugins.plain_values import pack

_LIBRARIES = ("torch.", "torchdata.", "lightning.", "lit_mnist.", "builtins")


class ReplayLoader:
    """Iterates a dataloader, and can bring a new one to the same position.

    It requires only that the batches of an epoch are a function of random numbers: the generators are set to their
    states at the start of the epoch, and as many batches as were used are loaded again. The seeds of worker processes
    follow from these states. If the loader has a state that covers everything (see `uses_state`), that is used instead.

    Args:
        loader: The dataloader. Its attributes are also attributes of this object.
        before_fetch: Called before each batch is loaded.
    """

    delivered: int

    def __init__(self, loader: Any, before_fetch: Callable[[ReplayLoader], None]) -> None:
        self._loader, self._before_fetch = loader, before_fetch
        self._iterator: Iterator[Any] | None = None
        self._stream: RandomStream | None = None
        self._start: dict[str, Any] = {}
        self._pending: dict[str, Any] | None = None
        self._next_epoch: dict[str, Any] | None = None
        # An unsized loader is one batch ahead of the training.
        self._recent: deque[Any] = deque(maxlen=2)
        self._state_before: Any = None
        self._begun, self._sized = 0, True
        self.delivered = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets attributes of loaders, such as the worker_init_fn.
        own = name.startswith("_") or name == "delivered"
        object.__setattr__(self if own else self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> ReplayLoader:
        self.delivered, self._iterator = 0, None
        self._recent.clear()
        if self._pending is None and self._next_epoch is None:
            self._begin()
        return self

    def __next__(self) -> Any:
        self._before_fetch(self)
        if self._next_epoch is not None:
            restore_own_generators(self._next_epoch, self._loader)
            self._next_epoch = None
            self._begin()
        if self.delivered == 0:
            self._start["fetch"] = self._generators()
        return self._fetch()

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._begun > 0

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing, so that Lightning does not warn that the loader has no state; see `position`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def position(self, in_flight: int) -> dict[str, Any]:
        """Returns the position before the next batch as nested plain values and tensors.

        Args:
            in_flight: Number of batches that were loaded, but not used yet.
        """
        used = self.delivered - in_flight
        state = None
        if used and self.uses_state:
            state = self._state_before if in_flight else self._loader.state_dict()
        return {
            "start": self._start,
            "used": used,
            "digest": digest_of(*self._recent[-1 - in_flight]) if used else None,
            "state": state,
        }

    def resume_from(self, position: dict[str, Any]) -> None:
        """Sets the position at which the next iteration begins; `replay` goes there."""
        self._pending = position

    def own_generators(self) -> dict[str, Any]:
        """Returns the states of the loader's own generators, for an epoch that follows; see `begin_late`."""
        return own_generators(self._loader)

    def begin_late(self, own: dict[str, Any]) -> None:
        """Lets the next epoch begin at its first batch, after the hooks of its start, as epochs but the first do.

        Args:
            own: The states of the loader's own generators.
        """
        self._next_epoch = own

    def replay(self) -> None:
        """Goes to the position.

        Raises:
            InputError: The loader does not give the same batches as before.
        """
        position, self._pending = self._pending, None
        if position is None:
            return
        start = position["start"]
        if position["state"] is not None:
            self._loader.load_state_dict(position["state"])
            self._begun, self._sized, self._iterator = 1, _is_sized(self._loader), iter(self._loader)
            self._start, self.delivered = start, position["used"]
            return
        if start["again"]:
            # Persistent workers draw a seed when they are started, which was in an earlier epoch.
            iter(self._loader)
        self._set_generators(start["iter"])
        self._begin()
        if "fetch" in start:
            self._set_generators(start["fetch"])
        self._start = start
        self._repeat(position["used"], position["digest"])

    def _repeat(self, used: int, digest: str | None) -> None:
        """Loads the batches that were used."""
        after_first: dict[str, Any] = {}
        for _ in range(used):
            try:
                self._fetch()
            except StopIteration:
                raise InputError(_changed("has fewer batches")) from None
            after_first = after_first or process_generators()
        # A dataset that draws in this process gives other values, since the training has drawn in between. Its order is
        # the same, and the generators are set to their states at the save.
        if digest is None or pack(process_generators()) != pack(after_first):
            return
        if digest != digest_of(*self._recent[-1]):
            raise InputError(_changed(f"gives a different batch {used}"))

    @property
    def uses_state(self) -> bool:
        """Whether the loader's `state_dict` is used.

        The state of a StatefulDataLoader leaves out its workers' generators, so that a dataset that may draw from them
        has to have a state itself.
        """
        if not _is_stateful(self._loader):
            return False
        dataset = getattr(self._loader, "dataset", None)
        workers = getattr(self._loader, "num_workers", 0)
        return not workers or isinstance(dataset, TensorDataset) or _is_stateful(dataset)

    def _begin(self) -> None:
        again = self._begun > 0 and bool(getattr(self._loader, "persistent_workers", False))
        self._start = {"iter": self._generators(), "again": again}
        self._stream = RandomStream() if self._draws_here else None
        self._begun, self._sized = self._begun + 1, _is_sized(self._loader)
        with self._own_stream():
            self._iterator = iter(self._loader)

    @property
    def _draws_here(self) -> bool:
        """Whether the order may depend on numbers drawn in this process, between which the training draws others.

        The samplers of libraries draw only at the start of an epoch.
        """
        loader = self._loader
        if self.uses_state:
            return False
        if not isinstance(loader, DataLoader):
            return True
        if isinstance(loader.dataset, IterableDataset):
            return loader.num_workers == 0
        samplers = type(loader.sampler), type(loader.batch_sampler)
        return not all(kind.__module__.startswith(_LIBRARIES) for kind in samplers)

    def _own_stream(self) -> AbstractContextManager[None]:
        return self._stream.active() if self._stream else nullcontext()

    def _fetch(self) -> Any:
        assert self._iterator is not None
        if not self._sized and self.delivered and self.uses_state:
            self._state_before = self._loader.state_dict()
        with self._own_stream():
            batch = next(self._iterator)
        self._recent.append((batch, versions_of(batch)))
        self.delivered += 1
        return batch

    def _generators(self) -> dict[str, Any]:
        return {"process": process_generators(), "own": own_generators(self._loader)}

    def _set_generators(self, states: dict[str, Any]) -> None:
        restore_process_generators(states["process"])
        restore_own_generators(states["own"], self._loader)


def _is_sized(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _changed(what: str) -> str:
    return (
        f"The training cannot be resumed exactly: the train dataloader {what} than before, although all generators "
        "were restored. Its data have changed, or its dataset has a state of its own. Make its batches a function of "
        "the index and of random numbers, or give the loader state_dict and load_state_dict."
    )
