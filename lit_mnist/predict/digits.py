"""Predictions of digits: `predictions.csv` and `predictions.png`, and lines on the terminal for a user's images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lit_mnist.data.dataset import Dataset, Split, load_dataset
from lit_mnist.distributed.terminal import print_line
from lit_mnist.experiment import DataSettings
from lit_mnist.predict.grid import draw_grid
from lit_mnist.predict.table import NO_INK, DigitPrediction, format_predictions, write_table
from lit_mnist.predict.user_images import read_images
from lit_mnist.training.evaluation import Prediction
from lit_mnist.training.job import ExperimentJob

TABLE, GRID = "predictions.csv", "predictions.png"
_MIN_PROBABILITY = 0.7


def load_user_images(files: Sequence[Path], settings: DataSettings, *, fetch: bool) -> Dataset:
    """Returns the data set with a user's images as the test split.

    Raises:
        InputError: Images or the data set cannot be read.
    """
    dataset, digits = load_dataset(settings, fetch=fetch), read_images(files, settings.name)
    return replace(dataset, test=Split(digits, torch.zeros(len(digits), dtype=torch.int64)))


def collect_rows(_job: ExperimentJob, batches: Iterable[Prediction]) -> list[tuple[int, float, int]]:
    """Returns index, probability and predicted class of each image of this rank."""
    rows = (zip(*(part.tolist() for part in batch), strict=True) for batch in batches)
    return [(int(index), float(share), int(predicted)) for batch in rows for index, predicted, share in batch]


def write(job: ExperimentJob, rows: Sequence[Sequence[Any]]) -> Sequence[str]:
    """Writes the table and the grid from the rows of all ranks, and prints a line for each of a user's images.

    Raises:
        InputError: A file cannot be written.
    """
    split = job.splits.test
    assert isinstance(split, Split)
    predictions = [DigitPrediction(predicted, probability) for _, probability, predicted in rows]
    if job.files:
        for number, file in enumerate(job.files):
            note = "uncertain: probability below 70 %" if predictions[number].probability < _MIN_PROBABILITY else ""
            note = note if split.images[number].any() else NO_INK
            predictions[number] = predictions[number]._replace(file=file, note=note)
    else:
        predictions = [predictions[n]._replace(label=label) for n, label in enumerate(split.labels.tolist())]
    write_table(job.folder / TABLE, predictions)
    draw_grid(job.folder / GRID, split.images, predictions, job.dataset.class_names)
    for line in format_predictions(predictions, job.dataset.class_names) if job.files else ():
        print_line(line)
    return TABLE, GRID
