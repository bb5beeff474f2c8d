"""Predictions as a table: one CSV row per picture, in the pictures' order."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import torch

from lit_mnist.errors import InputError
from lit_mnist.training.files import whole_file


def write_table(
    path: Path,
    predicted: torch.Tensor,
    probability: torch.Tensor,
    labels: torch.Tensor | None = None,
    files: Sequence[Path] | None = None,
) -> None:
    """Writes `index,label,predicted,probability`, and a last column `file` where the pictures are files.

    A reader sees the old table or the whole new one, never a part.

    Args:
        path: The CSV file; its folder must exist.
        predicted: The predicted classes, integers [N].
        probability: The softmax probability of each predicted class, float [N]; written with 6 decimals.
        labels: The true classes, integers [N]; None leaves the column empty.
        files: Where each picture comes from.

    Raises:
        ValueError: The lengths differ, or a probability is not within 0 and 1.
        InputError: The file cannot be written.
    """
    count = len(predicted)
    for column in (probability, labels, files):
        if column is not None and len(column) != count:
            raise ValueError(f"{count} predictions, but a column of {len(column)}")
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError("a probability is not within 0 and 1")
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["index", "label", "predicted", "probability", *(["file"] if files is not None else [])])
    shares = [f"{share:.6f}" for share in probability.tolist()]
    truth = [""] * count if labels is None else labels.tolist()
    for index, row in enumerate(zip(truth, predicted.tolist(), shares, strict=True)):
        table.writerow([index, *row, *([str(files[index])] if files is not None else [])])
    try:
        with whole_file(path) as file:
            # A file's name that is not UTF-8 reaches Python as lone surrogates and goes back to its own bytes.
            file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise InputError(f"{path}: the table cannot be written ({error.strerror or error})") from error
