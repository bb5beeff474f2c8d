"""Predictions as a table: one CSV row per image, in the images' order."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import torch

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.errors import InputError
from lit_mnist.predict.doubts import NO_INK


def write_table(
    path: Path,
    predicted: torch.Tensor,
    probability: torch.Tensor,
    labels: torch.Tensor | None = None,
    files: Sequence[Path] | None = None,
    notes: Sequence[str] | None = None,
) -> None:
    """Writes `index,label,predicted,probability`, and of a user's own images the columns `file` and `note`.

    A reader sees the old table or the whole new one, never a part.

    Args:
        path: The CSV file; its folder must exist.
        predicted: The predicted classes, integers [N].
        probability: The softmax probability of each predicted class, float [N]; written with 6 decimals.
        labels: The true classes, integers [N]; None leaves the column empty.
        files: Where each image comes from.
        notes: What speaks against each prediction, see `doubts`; without ink, class and probability stay empty.

    Raises:
        ValueError: The lengths differ, or a probability is not within 0 and 1.
        InputError: The file cannot be written.
    """
    count = len(predicted)
    for column in (probability, labels, files, notes):
        if column is not None and len(column) != count:
            raise ValueError(f"{count} predictions, but a column of {len(column)}")
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError("a probability is not within 0 and 1")
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    own = {name: column for name, column in (("file", files), ("note", notes)) if column is not None}
    table.writerow(["index", "label", "predicted", "probability", *own])
    truth = [""] * count if labels is None else labels.tolist()
    for index, (true, guess, share) in enumerate(zip(truth, predicted.tolist(), probability.tolist(), strict=True)):
        nothing = notes is not None and notes[index] == NO_INK
        answer = ["", ""] if nothing else [guess, f"{share:.6f}"]
        table.writerow([index, true, *answer, *(str(column[index]) for column in own.values())])
    try:
        with atomic_file(path) as file:
            # A file's name that is not UTF-8 reaches Python as lone surrogates and goes back to its own bytes.
            file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise InputError(f"{path}: the table cannot be written ({error.strerror or error})") from error
