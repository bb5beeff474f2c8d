"""Predictions of the test set or of a user's images. Each task has a module with the same three functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.errors import NonFiniteError

if TYPE_CHECKING:
    from lit_mnist.data.dataset import Dataset
    from lit_mnist.distributed.rank import Rank
    from lit_mnist.experiment import DataSettings
    from lit_mnist.experiment.task import Task
    from lit_mnist.training.evaluation import Prediction
    from lit_mnist.training.job import ExperimentJob


class PredictionModule(Protocol):
    """The functions of the module of a task."""

    def load_user_images(self, files: Sequence[Path], settings: DataSettings, /, *, fetch: bool) -> Dataset:
        """Returns a data set with a user's images as the test split."""

    def collect_rows(self, job: ExperimentJob, batches: Iterable[Prediction], /) -> Sequence[Sequence[Any]]:
        """Returns the rows of one rank, each starting with index and probability; writes the files of each rank."""

    def write(self, job: ExperimentJob, rows: Sequence[Sequence[Any]], /) -> Sequence[str]:
        """Writes the files of rank 0 from the rows of all ranks, and returns the names of all files."""


def get_prediction_module(task: Task) -> PredictionModule:
    """Returns the module of a task."""
    from lit_mnist.predict import digits, segmentation

    if task.pixelwise:
        return segmentation
    return digits


def write_predictions(job: ExperimentJob, rank: Rank, batches: Iterable[Prediction]) -> None:
    """Writes the predictions of all ranks as one table, and the predicted images; every rank must call it.

    Args:
        job: The job.
        rank: This rank.
        batches: The predictions of this rank.

    Raises:
        InputError: A file cannot be written.
        NonFiniteError: A probability is not finite.
    """
    from lit_mnist.distributed.gather import all_gather_json

    module = get_prediction_module(job.experiment.data.task)
    rows = sorted(row for part in all_gather_json(module.collect_rows(job, batches)) for row in part)
    if not all(math.isfinite(row[1]) for row in rows):
        raise NonFiniteError("The outputs of the network are not finite: the training behind this checkpoint diverged.")
    if rank.is_first:
        assert [row[0] for row in rows] == list(range(len(job.splits.test)))
        places = ", ".join(display_path(job.folder / name) for name in module.write(job, rows))
        print_line(f"predicted {len(rows)} image{'s' * (len(rows) != 1)}: {places}")
