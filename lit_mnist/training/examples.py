"""The examples in a report: misclassified digits, or the best and the worst segmentation images."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lit_mnist.data.dataset import IGNORED
from lit_mnist.distributed.gather import all_gather_json

# Numbers of misclassified digits, and of segmentation images of each kind, in a report.
MISTAKES_KEPT, KEPT = 40, 6


class Wrong(NamedTuple):
    """A misclassified sample: its index in the split, the predicted class, and the probability of that class."""

    sample: int
    predicted: int
    probability: float


class Scored(NamedTuple):
    """A segmentation image and its prediction.

    Attributes:
        sample: Index in the split.
        score: Mean IoU over the classes in the targets or the predictions, from 0 to 1.
        mask: Predicted classes, uint8 [height, width], in the size of the network's input.
    """

    sample: int
    score: float
    mask: npt.NDArray[np.uint8]


Example = Wrong | Scored


class Examples:
    """Collects the examples of one rank."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.wrong: list[torch.Tensor] = []
        self.scored: list[Scored] = []

    def add(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> None:
        """Adds a batch; arguments as for `EvaluationSums.update`. A batch without indices is ignored."""
        if not len(indices):
            return
        logits = logits.float() if logits.dtype in {torch.float16, torch.bfloat16} else logits
        if targets.ndim == 1:
            self.wrong.append(mistakes(logits, targets, indices))
            return
        predicted = logits.argmax(dim=1)
        scores = image_scores(predicted, targets, self.num_classes)
        # The score of an image without a valid pixel is NaN.
        found = [(row, score) for row, score in enumerate(scores.tolist()) if math.isfinite(score)]
        masks = predicted.to(torch.uint8).cpu().numpy()
        added = [Scored(int(indices[row]), score, masks[row].copy()) for row, score in found]
        self.scored = best_and_worst([*self.scored, *added])

    def gather(self) -> list[Example]:
        """Returns the examples of all ranks; every rank must call it."""
        return [*gather_mistakes(self.wrong), *_gather_scored(self.scored)]


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


def image_scores(predicted: torch.Tensor, targets: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Returns the mean IoU of each image, float64 [batch]; NaN for an image without a valid pixel.

    Args:
        predicted: Predicted classes, int64 [batch, height, width].
        targets: True classes, int64 [batch, height, width]; pixels of class `IGNORED` are left out.
        num_classes: Number of classes.
    """
    batch = len(predicted)
    valid = targets != IGNORED
    image = torch.arange(batch, device=predicted.device).view(-1, 1, 1).expand_as(targets)
    cells = (image * num_classes + targets) * num_classes + predicted
    counts = (
        cells[valid].bincount(minlength=batch * num_classes**2).view(batch, num_classes, num_classes).double().cpu()
    )
    both = counts.diagonal(dim1=1, dim2=2)
    either = counts.sum(dim=1) + counts.sum(dim=2) - both
    return (both / either.clamp(min=1)).sum(dim=1) / (either > 0).sum(dim=1)


def best_and_worst(scored: Iterable[Scored]) -> list[Scored]:
    """Returns the `KEPT` best and the `KEPT` worst images, best first; ties are broken by the lower index."""
    ordered = sorted(scored, key=lambda image: (-image.score, image.sample))
    if len(ordered) <= 2 * KEPT:
        return ordered
    worst = sorted(ordered[KEPT:], key=lambda image: (image.score, image.sample))[:KEPT]
    return [*ordered[:KEPT], *sorted(worst, key=lambda image: (-image.score, image.sample))]


def _gather_scored(own: list[Scored]) -> list[Scored]:
    packed = [(sample, score, mask.shape, b64encode(mask.tobytes()).decode()) for sample, score, mask in own]
    return best_and_worst(
        Scored(sample, score, np.frombuffer(b64decode(mask), np.uint8).reshape(shape))
        for part in all_gather_json(packed)
        for sample, score, shape, mask in part
    )
