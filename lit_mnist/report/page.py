"""The report of a run as an HTML page, which rank 0 writes at the end of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lit_mnist.report.confusion import classification
from lit_mnist.report.formats import count
from lit_mnist.report.html import data_url, write_page
from lit_mnist.report.metrics import History, metric_curves

MAX_MISTAKES = 40
_SIDE = 28  # height and width in pixels of the digits


@dataclass(frozen=True, eq=False)
class Mistake:
    """A misclassified test image.

    Args:
        image: The image as stored, uint8 [28, 28].
        index: Its index in the test set.
        label: The true class.
        predicted: The predicted class.
        probability: Probability of the predicted class, from 0 to 1.

    Raises:
        ValueError: The image has another shape or dtype.
    """

    image: np.ndarray[Any, np.dtype[np.uint8]]
    index: int
    label: int
    predicted: int
    probability: float

    def __post_init__(self) -> None:
        if self.image.shape != (_SIDE, _SIDE) or self.image.dtype != np.uint8:
            raise ValueError(
                f"A mistake's image must be uint8 [{_SIDE}, {_SIDE}], but is {self.image.dtype} "
                f"{list(self.image.shape)}."
            )

    @property
    def url(self) -> str:
        """The image as a data URL, dark on light as on paper."""
        return data_url(Image.fromarray(255 - self.image), "PNG", optimize=True)


def write_report(
    path: Path,
    *,
    result: Mapping[str, Any],
    history: History,
    mistakes: Sequence[Mistake],
    class_names: Sequence[str],
) -> None:
    """Writes the report of a run atomically.

    Args:
        path: The file to write; its folder must exist.
        result: The content of `result.json`; missing values are shown as a dash.
        history: The rows of `metrics.csv` in order; missing metrics are absent or NaN.
        mistakes: Misclassified test images; those with the highest probabilities are shown.
        class_names: The class names.

    Raises:
        ValueError: The result or a mistake does not match the class names.
        OSError: The file cannot be written.
    """
    for mistake in mistakes:
        if not {mistake.label, mistake.predicted} <= set(range(len(class_names))):
            raise ValueError(
                f"Test image {mistake.index} is of class {mistake.label}, predicted as {mistake.predicted}, "
                f"but there are {len(class_names)} class names."
            )
    test = result.get("test") or {}
    matrix, scores = classification(test, class_names)
    write_page(
        path,
        "lit_mnist.report",
        "report.html.jinja",
        result=result,
        errors=_errors(test),
        covered=_covered(result),
        plots=metric_curves(history),
        matrix=matrix,
        scores=scores,
        mistakes=sorted(mistakes, key=lambda mistake: (-mistake.probability, mistake.index))[:MAX_MISTAKES],
        class_names=class_names,
    )


def _errors(test: Mapping[str, Any]) -> int | None:
    matrix = test.get("confusion")
    return None if matrix is None else int(sum(map(sum, matrix)) - sum(row[n] for n, row in enumerate(matrix)))


def _covered(result: Mapping[str, Any]) -> str:
    """Returns which steps the times cover after a resume, or an empty string if they cover all."""
    steps, timed = result.get("steps"), (result.get("train") or {}).get("steps")
    if steps is None or timed is None or timed >= steps:
        return ""
    return f"the last {count(timed)} of {count(steps)} steps, since the resume"
