"""The best and the worst of the scenes that an evaluation sees, kept with their predictions for the report."""

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

# Images that are kept of each kind.
KEPT = 6


class Scored(NamedTuple):
    """A scene and what was predicted for it.

    Attributes:
        sample: Its number in the split.
        score: Its own mean IoU, over the classes that it shows or is predicted to show, from 0 to 1.
        mask: The predicted classes, uint8 [height, width], in the size that the network saw.
    """

    sample: int
    score: float
    mask: npt.NDArray[np.uint8]


class Extremes:
    """The best and worst scenes that one rank has seen.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self.scored: list[Scored] = []

    def add(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> None:
        """Adds a batch.

        Args:
            logits: [batch, classes, height, width].
            targets: Classes, int64 [batch, height, width], `IGNORED` where a pixel has none.
            indices: The samples' numbers, int64 [batch].
        """
        predicted = logits.argmax(dim=1)
        scores = image_scores(predicted, targets, self._num_classes)
        # A scene without any pixel of a class has no score.
        found = [(row, score) for row, score in enumerate(scores.tolist()) if math.isfinite(score)]
        masks = predicted.to(torch.uint8).cpu().numpy()
        added = [Scored(int(indices[row]), score, masks[row].copy()) for row, score in found]
        self.scored = extremes_of([*self.scored, *added])


def image_scores(predicted: torch.Tensor, targets: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Returns each scene's own mean IoU, float64 [batch], not a number where no pixel counts.

    Args:
        predicted: Predicted classes, int64 [batch, height, width].
        targets: True classes, int64 [batch, height, width], `IGNORED` where a pixel counts nowhere.
        num_classes: Number of classes.
    """
    batch = len(predicted)
    valid = targets != IGNORED
    scene = torch.arange(batch, device=predicted.device).view(-1, 1, 1).expand_as(targets)
    cells = (scene * num_classes + targets) * num_classes + predicted
    counts = (
        cells[valid].bincount(minlength=batch * num_classes**2).view(batch, num_classes, num_classes).double().cpu()
    )
    both = counts.diagonal(dim1=1, dim2=2)
    either = counts.sum(dim=1) + counts.sum(dim=2) - both
    return (both / either.clamp(min=1)).sum(dim=1) / (either > 0).sum(dim=1)


def extremes_of(scored: Iterable[Scored]) -> list[Scored]:
    """Returns the best and the worst, each once, the best first; of equal ones those with the lower numbers."""
    ordered = sorted(scored, key=lambda scene: (-scene.score, scene.sample))
    if len(ordered) <= 2 * KEPT:
        return ordered
    worst = sorted(ordered[KEPT:], key=lambda scene: (scene.score, scene.sample))[:KEPT]
    return [*ordered[:KEPT], *sorted(worst, key=lambda scene: (-scene.score, scene.sample))]


def gather_extremes(own: Extremes) -> list[Scored]:
    """Returns the best and worst over all ranks, the best first; every rank must call it."""
    packed = [(sample, score, mask.shape, b64encode(mask.tobytes()).decode()) for sample, score, mask in own.scored]
    return extremes_of(
        Scored(sample, score, np.frombuffer(b64decode(mask), np.uint8).reshape(shape))
        for part in all_gather_json(packed)
        for sample, score, shape, mask in part
    )
