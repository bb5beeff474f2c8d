"""Exact evaluation over any number of ranks: each sample counts once, sums are put together once at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from lit_mnist.errors import NonFiniteError

# As many as a report shows.
MISTAKES_KEPT = 40


@dataclass(frozen=True)
class Evaluation:
    """Figures over a whole split.

    Attributes:
        accuracy: Share of the samples classified rightly, from 0 to 1.
        loss: Mean cross-entropy in nats.
        count: Number of samples.
        per_class: Accuracy of each class; 0 for a class without samples.
        confusion: Counts, rows the true and columns the predicted class.
    """

    accuracy: float
    loss: float
    count: int
    per_class: list[float]
    confusion: list[list[int]]


class Wrong(NamedTuple):
    """A sample classified wrongly: its number, the class predicted, and that class's probability."""

    sample: int
    predicted: int
    probability: float


def evaluation_of(confusion: torch.Tensor, loss_sum: torch.Tensor, expected: int) -> Evaluation:
    """Returns the figures that follow from the sums over all ranks.

    The confusion matrix is the root of every count: accuracy is its diagonal (what torchmetrics calls the micro
    average), so that no figure can disagree with another.

    Args:
        confusion: Counts, rows the true and columns the predicted class, integers [classes, classes].
        loss_sum: Sum of the samples' cross-entropies in nats, a scalar.
        expected: Number of samples of the split.

    Raises:
        NonFiniteError: The loss is infinite or not a number.
    """
    confusion = confusion.long().cpu()
    count = int(confusion.sum())
    assert count == expected, f"{count} samples were evaluated, but the split has {expected}"
    loss = float(loss_sum) / count
    if not math.isfinite(loss):
        raise NonFiniteError("The network's outputs are not finite: the training has diverged. Try a lower --lr.")
    right, of_class = confusion.diagonal().double(), confusion.sum(dim=1)
    return Evaluation(
        accuracy=float(right.sum() / count),
        loss=loss,
        count=count,
        per_class=(right / of_class.clamp(min=1)).tolist(),
        confusion=confusion.tolist(),
    )


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
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, rows)
        rows = [row for part in gathered for row in part]
    wrong = [Wrong(int(sample), int(predicted), probability) for sample, predicted, probability in rows]
    return sorted(wrong, key=lambda mistake: (-mistake.probability, mistake.sample))[:MISTAKES_KEPT]


class Tally:
    """One rank's sums over the samples that it evaluates, for engines that put them together themselves.

    Args:
        num_classes: Number of classes.
        device: Where the sums are kept.

    Attributes:
        confusion: Counts, rows the true and columns the predicted class, int64 [classes, classes].
        loss_sum: Sum of the cross-entropies in nats, float64 scalar, so that the order of summation does not show.
        wrong: What `mistakes` found in each batch, where they are noted.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.wrong: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            logits: [batch, classes].
            targets: Classes, int64 [batch].
            indices: The samples' numbers, int64 [batch]: given where the mistakes are to be noted.
        """
        logits = _wide(logits)
        cells = targets * len(self.confusion) + logits.argmax(dim=1)
        self.confusion += cells.bincount(minlength=self.confusion.numel()).view_as(self.confusion)
        self.loss_sum += F.cross_entropy(logits, targets, reduction="sum").double()
        if indices is not None:
            self.wrong.append(mistakes(logits, targets, indices))


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in {torch.float16, torch.bfloat16} else logits


class ExactMetrics(nn.Module):
    """torchmetrics objects that sum over a split, kept by each rank and put together over all ranks by `compute`.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        # In double precision, so that the order of summation over the ranks does not show.
        self.loss_sum = SumMetric(nan_strategy="disable").set_dtype(torch.float64)
        self._wrong: list[torch.Tensor] = []

    def update(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None = None) -> None:
        """Adds a batch; arguments as of `Tally.add`."""
        logits = _wide(logits)
        self.confusion.update(logits.argmax(dim=1), targets)
        self.loss_sum.update(F.cross_entropy(logits, targets, reduction="sum").double())
        if indices is not None:
            self._wrong.append(mistakes(logits, targets, indices))

    def wrong(self) -> list[Wrong]:
        """Returns the mistakes over all ranks, the surest first; every rank must call it."""
        return gather_mistakes(self._wrong)

    def compute(self, expected: int) -> Evaluation:
        """Puts the ranks' sums together; every rank must call it, and gets the same figures.

        Args:
            expected: Number of samples of the split.

        Raises:
            NonFiniteError: The loss is infinite or not a number; all ranks raise it together.
        """
        return evaluation_of(self.confusion.compute(), self.loss_sum.compute(), expected)

    def reset(self) -> None:
        """Forgets all samples."""
        self.confusion.reset()
        self.loss_sum.reset()
        self._wrong = []
