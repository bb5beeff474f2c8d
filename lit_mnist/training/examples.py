"""The examples in a report: misclassified digits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lit_mnist.distributed.gather import all_gather_json

# Number of misclassified digits in a report.
MISTAKES_KEPT = 40


class Wrong(NamedTuple):
    """A misclassified sample: its index in the split, the predicted class, and the probability of that class."""

    sample: int
    predicted: int
    probability: float


class Examples:
    """Collects the examples of one rank."""

    def __init__(self) -> None:
        self.wrong: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> None:
        """Adds a batch; arguments as for `EvaluationSums.update`. A batch without indices is ignored."""
        if not len(indices):
            return
        logits = logits.float() if logits.dtype in {torch.float16, torch.bfloat16} else logits
        self.wrong.append(mistakes(logits, targets, indices))

    def gather(self) -> list[Wrong]:
        """Returns the examples of all ranks; every rank must call it."""
        return gather_mistakes(self.wrong)


def mistakes(logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the misclassified samples of a batch, with the fields of `Wrong` as columns.

    The result is a tensor, because an untrained network makes thousands of mistakes and lists are slow.

    Args:
        logits: Float [batch, classes].
        targets: Classes, int64 [batch].
        indices: Indices of the samples, int64 [batch].

    Returns:
        float64 [mistakes, 3] on the CPU, which represents each index exactly.
    """
    predicted = logits.argmax(dim=1)
    rows = (predicted != targets).nonzero()[:, 0]
    probability = logits[rows].softmax(dim=1).amax(dim=1).cpu()
    return torch.stack([indices.cpu()[rows.cpu()].double(), predicted[rows].cpu().double(), probability.double()], 1)


def gather_mistakes(own: list[torch.Tensor]) -> list[Wrong]:
    """Returns the `MISTAKES_KEPT` most confident mistakes of all ranks; every rank must call it.

    Args:
        own: The results of `mistakes` for each batch of this rank, in the order of the samples.
    """
    found = torch.cat([torch.zeros(0, len(Wrong._fields), dtype=torch.float64), *own])
    rows = found[found[:, 2].argsort(descending=True, stable=True)[:MISTAKES_KEPT]].tolist()
    gathered = [row for part in all_gather_json(rows) for row in part]
    wrong = [Wrong(int(sample), int(predicted), probability) for sample, predicted, probability in gathered]
    return sorted(wrong, key=lambda mistake: (-mistake.probability, mistake.sample))[:MISTAKES_KEPT]
