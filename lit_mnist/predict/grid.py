"""Predictions as a picture: a grid of digits, each with its class and probability, the wrong ones in red."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lit_mnist.errors import InputError
from lit_mnist.training.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 10
_CELL_WIDTH, _CELL_HEIGHT = 1.0, 1.46  # the digit is a square of 1; the two lines of text lie below it
_INCHES = 0.92  # per unit
_HEAD, _EDGE = 1.0, 0.45  # units above the digits and around the page
_GAP = 0.14
_INK, _SOFT, _WRONG, _PAPER = "#1c1f23", "#666c74", "#c8281e", "#fcfcfa"


def draw_grid(
    path: Path,
    images: torch.Tensor,
    predicted: torch.Tensor,
    probability: torch.Tensor,
    labels: torch.Tensor | None = None,
    class_names: Sequence[str] | None = None,
    limit: int = 100,
) -> None:
    """Draws the first digits with what was predicted for them, as a PNG picture.

    A reader sees the old picture or the whole new one, never a part.

    Args:
        path: The PNG file; its folder must exist.
        images: The digits, uint8 [N, 28, 28], light ink on black.
        predicted: The predicted classes, integers [N].
        probability: The softmax probability of each predicted class, float [N].
        labels: The true classes, integers [N]; None where they are not known.
        class_names: The name of each class; None shows its number.
        limit: How many digits are shown at most.

    Raises:
        ValueError: The lengths differ, or there is no digit to show.
        InputError: The file cannot be written.
    """
    for column in (predicted, probability, labels):
        if column is not None and len(column) != len(images):
            raise ValueError(f"{len(images)} pictures, but a column of {len(column)}")
    shown = min(len(images), limit)
    if shown < 1:
        raise ValueError("no digit to show")
    # matplotlib takes a third of a second to import, which every other command would pay for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(shown, _COLUMNS)
    rows = math.ceil(shown / columns)
    # A lone digit's page is still wide enough for the title.
    width = max(columns * (_CELL_WIDTH + _GAP) - _GAP, 4.2) + 2 * _EDGE
    height = rows * _CELL_HEIGHT + _HEAD + _EDGE
    figure = Figure(figsize=(width * _INCHES, height * _INCHES), dpi=150, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-_EDGE, width - _EDGE), ylim=(height - _HEAD, -_HEAD))
    axes.axis("off")
    _write_title(axes, shown, len(images), None if labels is None else int((labels != predicted).sum()))
    for index in range(shown):
        label = None if labels is None else int(labels[index])
        corner = (index % columns * (_CELL_WIDTH + _GAP), index // columns * _CELL_HEIGHT)
        _draw_cell(axes, corner, images[index], int(predicted[index]), float(probability[index]), label, class_names)
    try:
        with whole_file(path) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise InputError(f"{path}: the picture cannot be written ({error.strerror or error})") from error


def _write_title(axes: Axes, shown: int, total: int, wrong: int | None) -> None:
    pass


def _draw_cell(axes, corner, image, predicted, probability, label, class_names) -> None:
    pass
