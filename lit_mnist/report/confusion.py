"""The confusion matrix and the score of each class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_mnist.report.formats import MISSING, count, percent

MAX_PAIRS = 5

Matrix = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ClassScore:
    """The error of a class.

    Attributes:
        name: The name of the class.
        value: The score as text.
        bar: Length of its bar, from 0 to 1.
        note: Its number of errors and of samples.
    """

    name: str
    value: str
    bar: float
    note: str


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix: rows are the true classes, columns the predicted classes.

    Attributes:
        matrix: Counts.
        names: The class names.
    """

    matrix: Matrix
    names: Sequence[str]

    @property
    def best(self) -> int:
        """The largest number on the diagonal."""
        return max(row[n] for n, row in enumerate(self.matrix))

    @property
    def worst(self) -> int:
        """The largest number off the diagonal."""
        return max((value for value, _, _ in self._errors()), default=0)

    def shade(self, true: int, predicted: int) -> float:
        """Returns the shade of a cell, from 0 to 1; correct predictions and errors have separate scales."""
        value = self.matrix[true][predicted]
        # The square root keeps a single error visible beside a frequent one.
        return value / self.best if true == predicted else math.sqrt(value / self.worst)

    def most_frequent(self) -> list[tuple[str, str, str]]:
        """Returns the most frequent errors: true class, predicted class and number."""
        pairs = sorted(self._errors(), key=lambda pair: (-pair[0], pair[1:]))[:MAX_PAIRS]
        return [(self.names[n], self.names[m], count(value)) for value, n, m in pairs]

    def _errors(self) -> list[tuple[int, int, int]]:
        return [
            (value, n, m) for n, row in enumerate(self.matrix) for m, value in enumerate(row) if n != m and value > 0
        ]


def classification(test: Mapping[str, Any], names: Sequence[str]) -> tuple[Confusion | None, list[ClassScore]]:
    """Returns the confusion matrix, and the error of each class.

    Args:
        test: `test` of the result, with `confusion` and `per_class` (accuracies); each may be absent.
        names: The class names.

    Raises:
        ValueError: The matrix or the accuracies do not match the class names.
    """
    matrix: Matrix | None = test.get("confusion")
    accuracies: Sequence[float | None] | None = test.get("per_class")
    if matrix is not None:
        _check(matrix, names)
    if accuracies is not None and len(accuracies) != len(names):
        raise ValueError(f"There are {len(accuracies)} accuracies of classes, but {len(names)} class names.")
    rows: list[tuple[float | None, int | None, str]] = []
    if matrix is not None:
        for n, row in enumerate(matrix):
            wrong, total = sum(row) - row[n], sum(row)
            rows.append((wrong / total if total else None, total, f"{count(wrong)} of {count(total)}"))
    elif accuracies is not None:
        rows = [(None if accuracy is None else 1 - accuracy, None, MISSING) for accuracy in accuracies]
    worst = max((_finite(error) for error, _, _ in rows), default=0.0) or 1.0
    scores = [
        ClassScore(name, percent(error, total), _finite(error) / worst, note)
        for name, (error, total, note) in zip(names, rows, strict=False)
    ]
    return (None if matrix is None else Confusion(matrix, names)), scores


def _check(matrix: Matrix, names: Sequence[str]) -> None:
    size = len(names)
    if {len(matrix), *map(len, matrix)} != {size}:
        raise ValueError(f"The confusion matrix is not {size} x {size}, as the {size} class names require.")


def _finite(share: float | None) -> float:
    return share if share is not None and math.isfinite(share) else 0.0
