"""A rank's training batches as a Trainer takes them: one loader for all epochs, each of which has its own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lit_mnist.data.device import Batch
from lit_mnist.data.loader import TrainBatches


class EpochLoader:
    """The micro-batches of one rank, in another order in each epoch.

    It is not a torch DataLoader, so that a Trainer does not shard it again. A Trainer tells the epoch to a loader's
    `sampler`, which it is itself.

    Args:
        batches: Returns the micro-batches of an epoch from one of them on.
        first: Returns the micro-batch that a Trainer resumes its epoch with, 0 in an epoch that it begins.
        epoch: The epoch until `set_epoch` is called.
    """

    def __init__(self, batches: Callable[[int, int], TrainBatches], first: Callable[[], int], epoch: int) -> None:
        self.epoch = epoch
        self._batches = batches
        self._first = first
        self._begins = False

    @property
    def sampler(self) -> EpochLoader:
        """What `set_epoch` is called of."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next pass has."""
        self.epoch = epoch
        self._begins = True

    def __len__(self) -> int:
        return len(self._batches(self.epoch, 0))

    def __iter__(self) -> Iterator[Batch]:
        # Asked for with the first batch: a Trainer restores its position after it has made its iterators. A callback
        # that makes a pass of its own within the epoch sees all of it.
        first, self._begins = self._first() if self._begins else 0, False
        yield from self._batches(self.epoch, first)

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the position follows from the Trainer's. With it, a Trainer knows that this can resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing; see `state_dict`."""
