"""The dataloader of a training run whose state is a function of the step; see docs/plugins.md for the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lit_mnist.plugins import loader_kinds as kinds
from lit_mnist.plugins.loader_proxy import LoaderProxy


def state_is_step(module: Any) -> bool:
    """Returns whether a module declares that its state is a function of the step."""
    return bool(getattr(module, "state_is_step", False))


def missing_for_step(loader: Any) -> str:
    """Returns what a train dataloader lacks for a training run whose state is a function of the step, or nothing."""
    if kinds.seekable(loader) is None:
        return f"the train dataloader, a {type(loader).__name__}, has no method seek(batch), nor has its batch sampler"
    return "" if kinds.length_of(loader) is not None else f"the {type(loader).__name__} has no length"


class SteppedLoader(LoaderProxy):
    """Iterates a dataloader that can seek, beginning each epoch with the batch that the training has reached.

    The iteration begins with the first batch, because a Trainer restores its position and sets the epoch after it has
    created its iterators.

    Args:
        loader: The dataloader.
        before_fetch: Called before each batch is loaded.
        next_batch: Returns the batch of the epoch that the training needs next, from 0.
    """

    def __init__(
        self, loader: Any, before_fetch: Callable[[SteppedLoader], None], next_batch: Callable[[], int]
    ) -> None:
        super().__init__(loader)
        self._before_fetch, self._next_batch = before_fetch, next_batch
        self._iterator: Iterator[Any] | None = None
        self._begun = False

    def __iter__(self) -> SteppedLoader:
        self.delivered, self._iterator = 0, None
        return self

    def __next__(self) -> Any:
        self._before_fetch(self)
        if self._iterator is None:
            kinds.seekable(self._loader).seek(self._next_batch())
            self._iterator, self._begun = iter(self._loader), True
        batch = next(self._iterator)
        self.delivered += 1
        return batch

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._begun
