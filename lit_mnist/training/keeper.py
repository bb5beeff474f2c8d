"""Which checkpoints a training keeps: the last, and the best by validation accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lit_mnist.training.checkpoint import BEST, LAST
from lit_mnist.training.evaluation import Evaluation


class Keeper:
    """Keeps the last checkpoint, and the best; without a validation split the last is the best.

    Args:
        folder: The run folder.
        save: Writes a checkpoint to a path.
        save_every: Optimizer steps between checkpoints within an epoch; None for none.

    Attributes:
        best: The best accuracy so far; below 0 for none.
    """

    def __init__(self, folder: Path, save: Callable[[Path], None], save_every: int | None) -> None:
        self.folder = folder / "checkpoints"
        self.save = save
        self.save_every = save_every
        self.best = -1.0

    def step_done(self, step: int, *, ends_epoch: bool) -> None:
        """Saves after a step where it is due; at an epoch's end `epoch_done` does."""
        if self.save_every and step % self.save_every == 0 and not ends_epoch:
            self.save(self.folder / LAST)

    def epoch_done(self, validation: Evaluation | None) -> bool:
        """Saves the epoch that ends, and returns whether it is the best so far."""
        is_best = validation is None or validation.accuracy > self.best
        if validation and is_best:
            self.best = validation.accuracy
        # The best first: were the run killed between the two, it would go on from before this epoch, and save it again.
        if is_best:
            self.save(self.folder / BEST)
        self.save(self.folder / LAST)
        return is_best
