"""What is shown of a test: the digits classified wrongly, or the best and the worst scenes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from lit_mnist.training.extremes import Extremes, Scored, gather_extremes


class Wrong(NamedTuple):
    """A sample classified wrongly: its number, the class predicted, and that class's probability."""

    sample: int
    predicted: int
    probability: float


Example = Wrong | Scored


def mistakes(logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> list[Wrong]:
    """Returns the samples of a batch that are classified wrongly; arguments as of `Tally.add`."""
    predicted = logits.argmax(dim=1)
    wrong = (predicted != targets).cpu()
    probability = logits.cpu()[wrong].softmax(dim=1).amax(dim=1)
    found = (indices.cpu()[wrong], predicted.cpu()[wrong], probability)
    return list(map(Wrong._make, zip(*(figures.tolist() for figures in found), strict=True)))


def gather_mistakes(own: list[Wrong]) -> list[Wrong]:
    """Returns the mistakes of all ranks, the surest first; every rank must call it."""
    found = own
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[list[Wrong]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
        found = [wrong for part in gathered for wrong in part]
    return sorted(found, key=lambda wrong: (-wrong.probability, wrong.sample))


class Examples:
    """What a rank notes of the samples that it tests: digits classified wrongly, or the best and the worst scenes.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int) -> None:
        self.wrong: list[Wrong] = []
        self.extremes: Extremes | None = None
        self.num_classes = num_classes

    def add(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> None:
        """Notes what is worth it of a batch; arguments as of `Tally.add`."""
        if targets.ndim == 1:
            self.wrong += mistakes(logits, targets, indices)
            return
        self.extremes = self.extremes or Extremes(self.num_classes)
        self.extremes.add(logits, targets, indices)

    def gather(self) -> list[Example]:
        """Returns those of all ranks; every rank must call it, and has evaluated a sample."""
        if self.extremes is None:
            return [*gather_mistakes(self.wrong)]
        return [*gather_extremes(self.extremes)]
