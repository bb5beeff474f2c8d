"""Predictions of digits as a table with one row per image, and as lines on the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.errors import InputError

MAX_LINES = 20
NO_INK = "no ink"


class DigitPrediction(NamedTuple):
    """The prediction for one image.

    Attributes:
        predicted: The predicted class.
        probability: Its softmax probability.
        label: The true class; None if it is not known.
        file: The user's file; None for an image of a data set.
        note: The reason why the prediction is uncertain. `NO_INK` means no prediction.
    """

    predicted: int
    probability: float
    label: int | None = None
    file: Path | None = None
    note: str = ""


def write_table(path: Path, predictions: Sequence[DigitPrediction]) -> None:
    """Writes `index,label,predicted,probability`, and for a user's images also `file,note`.

    Raises:
        InputError: The file cannot be written.
    """
    has_files = any(prediction.file for prediction in predictions)
    header = ["index", "label", "predicted", "probability", *(["file", "note"] if has_files else [])]
    rows = []
    for index, (predicted, probability, label, file, note) in enumerate(predictions):
        cells = ["", ""] if note == NO_INK else [predicted, f"{probability:.6f}"]
        rows.append([index, "" if label is None else label, *cells, *([file, note] if has_files else [])])
    write_csv(path, header, rows)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file atomically; raises InputError if this fails."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    try:
        with atomic_file(path) as file:
            # Python represents the bytes of a file name that is not UTF-8 as lone surrogates.
            file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise InputError(f"{path}: the table cannot be written ({error.strerror or error})") from error


def format_predictions(predictions: Sequence[DigitPrediction], class_names: Sequence[str]) -> list[str]:
    """Returns a line such as `one.png -> 7 (99.99 %)` per image, or for more than 20, how many are uncertain."""
    if len(predictions) > MAX_LINES:
        noted = sum(bool(prediction.note) for prediction in predictions)
        return [f"uncertain {noted:,} of {len(predictions):,} images: see their note in the table"] if noted else []
    lines = []
    for predicted, probability, _, file, note in predictions:
        # Rounded down: no prediction is certain.
        percent = min(math.floor(probability * 10_000), 9999) / 100
        parts = [] if note == NO_INK else [f"{class_names[predicted]} ({percent:.2f} %)"]
        lines.append(f"{escape_name(file or '')} -> {', '.join([*parts, *filter(None, [note])])}")
    return lines


def escape_name(name: str | Path) -> str:
    """Returns a file name with unprintable characters escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(name))
