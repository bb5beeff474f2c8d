"""What is shown of a test: the digits classified wrongly, or the best and the worst scenes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.training.extremes import Extremes, Scored, gather_extremes

# As many digits as a report shows.
MISTAKES_KEPT = 40


class Wrong(NamedTuple):
    """A sample classified wrongly: its number, the class predicted, and that class's probability."""

    sample: int
    predicted: int
    probability: float


Example = Wrong | Scored


def mistakes(logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the samples of a batch that are classified wrongly: a row for each, with the fields of `Wrong`.

    A tensor and no list, which took a network without training as long as a part of its forward pass.

    Args:
        logits: [batch, classes].
        targets: Classes, int64 [batch].
        indices: The samples' numbers, int64 [batch].

    Returns:
        float64 [wrong samples, 3], on the CPU; a double holds each sample's number exactly.
    """
    predicted = logits.argmax(dim=1)
    rows = (predicted != targets).nonzero()[:, 0]
    probability = logits[rows].softmax(dim=1).amax(dim=1).cpu()
    return torch.stack([indices.cpu()[rows.cpu()].double(), predicted[rows].cpu().double(), probability.double()], 1)


def gather_mistakes(own: list[torch.Tensor]) -> list[Wrong]:
    """Returns the surest mistakes of all ranks, at most `MISTAKES_KEPT`; every rank must call it.

    Args:
        own: What `mistakes` found in each of this rank's batches, in the samples' order.
    """
    found = torch.cat([torch.zeros(0, len(Wrong._fields), dtype=torch.float64), *own])
    # Before they become objects: a network without training makes thousands, and Python looks through all it has.
    rows = found[found[:, 2].argsort(descending=True, stable=True)[:MISTAKES_KEPT]].tolist()
    gathered = [row for part in all_gather_json(rows) for row in part]
    wrong = [Wrong(int(sample), int(predicted), probability) for sample, predicted, probability in gathered]
    return sorted(wrong, key=lambda mistake: (-mistake.probability, mistake.sample))[:MISTAKES_KEPT]


class Examples:
    """What a rank notes of the samples that it tests: digits classified wrongly, or the best and the worst scenes.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int) -> None:
        self.wrong: list[torch.Tensor] = []
        self.extremes: Extremes | None = None
        self.num_classes = num_classes

    def add(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> None:
        """Adds a batch; arguments as of `EvaluationSums.update`. Without the samples' numbers nothing is kept."""
        if not len(indices):
            return
        logits = logits.float() if logits.dtype in {torch.float16, torch.bfloat16} else logits
        if targets.ndim == 1:
            self.wrong.append(mistakes(logits, targets, indices))
            return
        self.extremes = self.extremes or Extremes(self.num_classes)
        self.extremes.add(logits, targets, indices)

    def gather(self) -> list[Example]:
        """Returns those of all ranks; every rank must call it, and has evaluated a sample."""
        if self.extremes is None:
            return [*gather_mistakes(self.wrong)]
        return [*gather_extremes(self.extremes)]
