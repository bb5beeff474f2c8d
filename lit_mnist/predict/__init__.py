"""Predictions of the test set or of a user's images. Each task has a module with the same three functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from lit_mnist.data.dataset import Dataset
    from lit_mnist.experiment import DataSettings
    from lit_mnist.experiment.task import Task
    from lit_mnist.training.job import Job

# Indices, int64 [batch]; predicted classes, [batch] or [batch, height, width]; and their probabilities, float [batch].
Prediction = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class PredictionModule(Protocol):
    """The functions of the module of a task."""

    def load_user_images(self, files: Sequence[Path], settings: DataSettings, /, *, fetch: bool) -> Dataset:
        """Returns a data set with a user's images as the test split."""

    def collect_rows(self, job: Job, batches: Iterable[Prediction], /) -> Sequence[Sequence[Any]]:
        """Returns the rows of one rank, each starting with index and probability; writes the files of each rank."""

    def write(self, job: Job, rows: Sequence[Sequence[Any]], /) -> Sequence[str]:
        """Writes the files of rank 0 from the rows of all ranks, and returns the names of all files."""


def get_prediction_module(task: Task) -> PredictionModule:
    """Returns the module of a task."""
    from lit_mnist.predict import digits, segmentation

    if task.pixelwise:
        return segmentation
    return digits
