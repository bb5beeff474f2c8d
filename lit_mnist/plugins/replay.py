"""A dataloader whose position can be restored: it seeks, or an interrupted epoch is repeated up to its last batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from lit_mnist.errors import InputError, require
from lit_mnist.plugins import loader_kinds as kinds
from lit_mnist.plugins.batch_digest import IndexRecord, Loaded, changed, check_same, versions_of
from lit_mnist.plugins.generators import (
    RandomStream,
    find_generators,
    object_generators,
    process_generators,
    restore_object_generators,
    restore_process_generators,
    states_of,
)
from lit_mnist.plugins.loader_proxy import LoaderProxy
from lit_mnist.plugins.sampler_state import SamplerState


class ReplayLoader(LoaderProxy):
    """Iterates a dataloader, and can bring a new one to the same position.

    A loader that can seek (see `loader_kinds`) is asked to seek. A loader with a state that covers everything loads it.
    Of any other, it requires only that the batches of an epoch are a function of random numbers: the generators are set
    to their states at the start of the epoch, and as many batches as were used are loaded again, or only their indices
    are drawn again if loading has no effect. The seeds of worker processes follow from these states. A position that
    something else has restored before is replaced, not added to.

    Args:
        loader: The dataloader.
        before_fetch: Called before each batch is loaded.
    """

    def __init__(self, loader: Any, before_fetch: Callable[[ReplayLoader], None]) -> None:
        super().__init__(loader)
        self._before_fetch = before_fetch
        self._iterator: Iterator[Any] | None = None
        self._stream: RandomStream | None = None
        self._start: dict[str, Any] = {}
        self._pending: dict[str, Any] | None = None
        self._next_epoch: dict[str, Any] | None = None
        # An unsized loader is one batch ahead of the training.
        self._recent: deque[Loaded] = deque(maxlen=2)
        self._record = IndexRecord()
        self._own: list[tuple[str, Any]] = []
        self._samplers = SamplerState(loader)
        self._state_before: Any = None
        self._begun, self._sized = 0, True

    def __iter__(self) -> ReplayLoader:
        self.delivered, self._iterator = 0, None
        self._recent.clear()
        if self._pending is None and self._next_epoch is None:
            self._begin()
        return self

    def __next__(self) -> Any:
        self._before_fetch(self)
        if self._next_epoch is not None:
            restore_object_generators(self._next_epoch["own"], self._loader)
            self._samplers.load(self._next_epoch["sampler"])
            self._next_epoch = None
            self._seek(0)
            self._begin()
        if self.delivered == 0:
            self._start["fetch"] = self._generators()
        return self._fetch()

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._begun > 0

    def position(self, in_flight: int) -> dict[str, Any]:
        """Returns the position before the next batch as nested plain values and tensors.

        Args:
            in_flight: Number of batches that were loaded, but not used yet.
        """
        used = self.delivered - in_flight
        state = None
        if used and kinds.uses_state(self._loader):
            # An empty state is not a position.
            state = (self._state_before if in_flight else self._loader.state_dict()) or None
        return {
            "start": self._start,
            "used": used,
            "length": kinds.length_of(self._loader),
            "last": self._recent[-1 - in_flight].identity() if used else {},
            "own": self._recent[-1].before.get("own", {}) if in_flight else states_of(self._own),
            "own_in_flight": states_of(self._own) if in_flight else {},
            "state": state,
        }

    def resume_from(self, position: dict[str, Any]) -> None:
        """Sets the position at which the next iteration begins; `replay` goes there."""
        self._pending = position

    def end(self) -> dict[str, Any]:
        """Returns the states of the loader's own generators and samplers after the training; see `begin_late`."""
        return {"own": object_generators(self._loader), "sampler": self._samplers.save()}

    def begin_late(self, end: dict[str, Any]) -> None:
        """Lets the next epoch begin at its first batch, after the hooks of its start, as epochs but the first do.

        Args:
            end: What `end` has returned; empty for a loader that is made again. In the first checkpoints, it was the
                generators alone.
        """
        self._next_epoch = end if "sampler" in end else {"own": end, "sampler": None}

    def end_flight(self, position: dict[str, Any]) -> None:
        """Restores the loader's own generators after a batch that was in flight has been loaded again."""
        restore_object_generators(position.get("own_in_flight", {}), self._loader)

    def replay(self) -> None:
        """Goes to the position.

        Raises:
            InputError: The loader does not give the same batches as before.
        """
        position, self._pending = self._pending, None
        if position is None:
            return
        length = kinds.length_of(self._loader)
        require(length == position["length"], changed(f"now has {length} batches instead of {position['length']}"))
        start, used = position["start"], position["used"]
        if position["state"] is not None:
            self._loader.load_state_dict(position["state"])
            self._begun, self._sized, self._iterator = 1, length is not None, iter(self._loader)
            self._start, self.delivered = start, used
            return
        if start["again"]:
            # Persistent workers draw a seed when they are started, which was in an earlier epoch.
            with self._record.watch(self._loader):
                iter(self._loader)
        self._set_generators(start["iter"])
        # Takes back what a LightningDataModule may have restored.
        self._samplers.load(start["sampler"])
        # The last batch is loaded again, so that it can be verified.
        seeks = kinds.seeks(self._loader)
        skipped = max(used - 1, 0) if seeks or kinds.skips(self._loader) else 0
        self._seek(skipped if seeks else 0)
        self._begin(0 if seeks else skipped)
        # With workers, the iterator has drawn the skipped indices already.
        if "fetch" in start and (seeks or not skipped or kinds.loads_here(self._loader)):
            self._set_generators(start["fetch"])
        self._start, self.delivered = start, skipped
        self._repeat(position, seeks=seeks)

    def _repeat(self, position: dict[str, Any], *, seeks: bool) -> None:
        """Loads the batches that were used, or the last of them if the others are skipped, and verifies it."""
        used, last, skipped = position["used"], position["last"], self.delivered
        while self.delivered < used:
            if self.delivered == used - 1 and last["before"] and (seeks or not skipped):
                # The training has drawn from these generators since the batch before.
                self._set_generators(last["before"])
            try:
                # The states before the last two batches may be saved; reading them takes a fifth of the time.
                self._fetch(keeps_states=self.delivered >= used - 2)
            except StopIteration:
                raise InputError(changed(f"has fewer than the {used} batches that were used")) from None
        if used:
            check_same(self._recent[-1], last, used, alone=seeks and skipped > 0)
        if skipped:
            self._record.order = last["order"]
            self._recent[-1] = self._recent[-1]._replace(order=last["order"], before=last["before"])
        # The training may have drawn from these generators after the last batch.
        restore_object_generators(position["own"], self._loader)

    def _begin(self, skip: int = 0) -> None:
        loader = self._loader
        again = self._begun > 0 and bool(getattr(loader, "persistent_workers", False))
        self._start = {"iter": self._generators(), "again": again, "sampler": self._samplers.save()}
        self._stream = RandomStream() if kinds.draws_here(loader) else None
        self._own = list(find_generators(loader))
        self._begun, self._sized = self._begun + 1, kinds.length_of(loader) is not None
        with self._in_stream() as stack:
            if not kinds.uses_state(loader):
                stack.enter_context(self._record.watch(loader, skip))
            self._iterator = iter(loader)

    def _seek(self, batch: int) -> None:
        target = kinds.seekable(self._loader)
        if target is not None:
            target.seek(batch)

    def _in_stream(self) -> ExitStack:
        stack = ExitStack()
        if self._stream:
            stack.enter_context(self._stream.active())
        return stack

    def _fetch(self, *, keeps_states: bool = True) -> Any:
        assert self._iterator is not None
        if not self._sized and self.delivered and kinds.uses_state(self._loader):
            self._state_before = self._loader.state_dict()
        before = {}
        if keeps_states and kinds.loads_here(self._loader):
            before = {"process": process_generators(), "own": states_of(self._own)}
        with self._in_stream():
            batch = next(self._iterator)
        self._recent.append(Loaded(batch, versions_of(batch), before, self._record.next(), self._record.order))
        self.delivered += 1
        return batch

    def _generators(self) -> dict[str, Any]:
        return {"process": process_generators(), "own": object_generators(self._loader)}

    def _set_generators(self, states: dict[str, Any]) -> None:
        restore_process_generators(states["process"])
        restore_object_generators(states["own"], self._loader)
