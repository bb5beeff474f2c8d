"""Exact evaluation over any number of ranks: each sample counts once, sums are put together once at the end.

A digit is one thing to classify, and a scene as many as it has pixels that count.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from lit_mnist.data.dataset import IGNORED
from lit_mnist.errors import NonFiniteError
from lit_mnist.training.examples import Example, Examples


@dataclass(frozen=True)
class Evaluation:
    """Figures over a whole split.

    Attributes:
        accuracy: Share of the samples classified rightly, from 0 to 1; for segmentation, of the pixels.
        loss: Mean cross-entropy in nats, for segmentation over the pixels.
        count: Number of samples.
        per_class: Accuracy of each class; 0 for a class without samples.
        confusion: Counts, rows the true and columns the predicted class; for segmentation, of pixels.
        iou: For segmentation, each class's intersection over union: of the pixels that belong to it or are predicted
            to, the share that both holds for; None for a class without such pixels.
        mean_iou: The mean over the classes that have one.
    """

    accuracy: float
    loss: float
    count: int
    per_class: list[float]
    confusion: list[list[int]]
    iou: list[float | None] | None = None
    mean_iou: float | None = None

    @property
    def score(self) -> float:
        """The figure by which the best weights are chosen: the mean intersection over union of scenes, or accuracy."""
        return self.accuracy if self.mean_iou is None else self.mean_iou

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures that there are, as plain values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def evaluation_of(
    confusion: torch.Tensor, sums: torch.Tensor, expected: int | None, *, segmentation: bool
) -> Evaluation:
    """Returns the figures that follow from the sums over all ranks.

    The confusion matrix is the root of every figure but the loss: accuracy is its diagonal (what torchmetrics calls the
    micro average), so that no figure can disagree with another.

    Args:
        confusion: Counts, rows the true and columns the predicted class, integers [classes, classes].
        sums: The sum of the cross-entropies in nats, and the number of samples, [2].
        expected: Number of samples of the split; None where not all of it was evaluated, or nobody knows its size.
        segmentation: Whether the counts are pixels.

    Raises:
        NonFiniteError: The loss is infinite or not a number.
    """
    confusion = confusion.long().cpu()
    loss_sum, samples = sums.tolist()
    assert expected in {samples, None}, f"{samples:.0f} samples were evaluated, but the split has {expected}"
    # Segmentation images may be all border.
    counted = max(int(confusion.sum()), 1)
    loss = loss_sum / counted
    if not math.isfinite(loss):
        raise NonFiniteError("The network's outputs are not finite: the training has diverged; lower --lr.")
    right, of_class = confusion.diagonal().double(), confusion.sum(dim=1)
    iou = _intersection_over_union(confusion) if segmentation else None
    known = [share for share in iou or [] if share is not None]
    return Evaluation(
        accuracy=float(right.sum() / counted),
        loss=loss,
        count=int(samples),
        per_class=(right / of_class.clamp(min=1)).tolist(),
        confusion=confusion.tolist(),
        iou=iou,
        mean_iou=sum(known) / max(len(known), 1) if segmentation else None,
    )


def _intersection_over_union(confusion: torch.Tensor) -> list[float | None]:
    both = confusion.diagonal()
    either = confusion.sum(dim=0) + confusion.sum(dim=1) - both
    return [int(n) / int(of) if of else None for n, of in zip(both, either, strict=True)]


def classified(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the predicted and the true classes of all that counts, each int64 [n]; arguments as of `Tally.add`."""
    predicted = logits.argmax(dim=1)
    if targets.ndim == 1:
        return predicted, targets
    counts = targets != IGNORED
    return predicted[counts], targets[counts]


def predictions_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what is predicted of each sample, and with which probability.

    Args:
        logits: Floating point, [batch, classes] or [batch, classes, height, width].

    Returns:
        Classes, int64 [batch], or for segmentation uint8 [batch, height, width]; and probabilities,
        float32 [batch], for segmentation the mean over the pixels.
    """
    probability, predicted = logits.float().softmax(dim=1).max(dim=1)
    if predicted.ndim == 1:
        return predicted, probability
    return predicted.to(torch.uint8), probability.mean(dim=(1, 2))


class Tally:
    """One rank's sums over the samples that it evaluates, for engines that put them together themselves.

    Args:
        num_classes: Number of classes.
        device: Where the sums are kept.

    Attributes:
        confusion: Counts, rows the true and columns the predicted class, int64 [classes, classes].
        sums: The sum of the cross-entropies in nats, and the number of samples, float64 [2], so that the order of
            summation does not show.
        examples: What is noted of the samples, where it is: see `Examples`.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.examples = Examples(num_classes)
        self.segmentation = False

    def add(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            logits: [batch, classes], or for segmentation [batch, classes, height, width].
            targets: Classes, int64 [batch] or [batch, height, width], in which `IGNORED` counts nowhere.
            indices: The samples' numbers, int64 [batch]: given where examples are to be noted.
        """
        logits = _wide(logits)
        predicted, true = classified(logits, targets)
        cells = true * len(self.confusion) + predicted
        self.confusion += cells.bincount(minlength=self.confusion.numel()).view_as(self.confusion)
        self.sums[0] += _loss_sum(logits, targets)
        self.sums[1] += len(targets)
        self.segmentation = targets.ndim > 1
        if indices is not None:
            self.examples.add(logits, targets, indices)

    def evaluation(self, expected: int) -> Evaluation:
        """Returns the figures, once the sums are those over all ranks; arguments and errors as of `evaluation_of`."""
        return evaluation_of(self.confusion, self.sums, expected, segmentation=self.segmentation)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in {torch.float16, torch.bfloat16} else logits


def _loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    ignored = IGNORED if targets.ndim > 1 else -100
    return F.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum").double()


class ExactMetrics(nn.Module):
    """torchmetrics objects that sum over a split, kept by each rank and put together over all ranks by `compute`.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        # In double precision, so that the order of summation over the ranks does not show.
        self.loss_sum = SumMetric(nan_strategy="disable").set_dtype(torch.float64)
        self.samples = SumMetric(nan_strategy="disable").set_dtype(torch.float64)
        self._examples = Examples(num_classes)
        self._segmentation = False

    def update(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor | None = None) -> None:
        """Adds a batch; arguments as of `Tally.add`."""
        logits = _wide(logits)
        self.confusion.update(*classified(logits, targets))
        self.loss_sum.update(_loss_sum(logits, targets))
        self.samples.update(float(len(targets)))
        self._segmentation = targets.ndim > 1
        if indices is not None:
            self._examples.add(logits, targets, indices)

    def examples(self) -> list[Example]:
        """Returns what was noted on all ranks; every rank must call it."""
        return self._examples.gather()

    def compute(self, expected: int | None) -> Evaluation:
        """Puts the ranks' sums together; every rank must call it, and gets the same figures.

        Args:
            expected: As of `evaluation_of`.

        Raises:
            NonFiniteError: The loss is infinite or not a number; all ranks raise it together.
        """
        sums = torch.stack([self.loss_sum.compute(), self.samples.compute()])
        return evaluation_of(self.confusion.compute(), sums, expected, segmentation=self._segmentation)

    def reset(self) -> None:
        """Forgets all samples."""
        self.confusion.reset()
        self.loss_sum.reset()
        self.samples.reset()
        self._examples = Examples(self.num_classes)
