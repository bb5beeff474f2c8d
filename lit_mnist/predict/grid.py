"""Draws predictions of digits as a grid with the class and probability of each digit. Wrong predictions are red.

A user's images also have their file names, and a question mark if the prediction is uncertain.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.errors import InputError
from lit_mnist.predict.table import NO_INK, DigitPrediction, escape_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Lengths in units: an image is a square of 1 x 1, with its caption below.
_COLUMNS = 10
_STEP_RIGHT, _STEP_DOWN = 1.16, 1.54
_HEAD, _EDGE = 1.06, 0.4  # the space above the images, and around them
_MIN_WIDTH = 4.6  # so that the title fits above a single image
_INCHES, _DPI = 14 / 15, 150  # a unit is 140 pixels: 5 for each of the 28 pixels of a digit
_INK, _SOFT, _WRONG, _HAIR, _PAPER = "#1c1f23", "#666c74", "#c8281e", "#dcdcd6", "#fcfcfa"
_UNCERTAIN = "#b06a00"
_MAX_NAME = 15  # characters of a file name that fit below an image


def draw_grid(
    path: Path,
    images: torch.Tensor,
    predictions: Sequence[DigitPrediction],
    class_names: Sequence[str],
    limit: int = 100,
) -> None:
    """Draws the first digits and their predictions, as a PNG file that is written atomically.

    Args:
        path: The PNG file.
        images: The digits, uint8 [N, 28, 28] with N > 0, light on black.
        predictions: The prediction of each digit.
        class_names: The name of each class.
        limit: Maximum number of digits in the grid.

    Raises:
        InputError: The file cannot be written.
    """
    # matplotlib takes half a second to import, and no other command needs it.
    from matplotlib.figure import Figure

    shown = min(len(images), limit)
    # A long class name shares a line with the probability: larger images leave more room for it.
    inches = _INCHES * max(1.0, 0.6 + 0.1 * max(map(len, class_names)))
    columns = min(shown, max(_COLUMNS, math.isqrt(shown)))
    width = max((columns - 1) * _STEP_RIGHT + 1, _MIN_WIDTH) + 2 * _EDGE
    height = math.ceil(shown / columns) * _STEP_DOWN + _HEAD + _EDGE / 2
    figure = Figure(figsize=(width * inches, height * inches), dpi=_DPI, facecolor=_PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    title, subtitle = f"Showing {shown:,} of {len(images):,} images", _subtitle(predictions, shown)
    axes.text(0, -0.62, title, fontsize=17, fontweight="bold", color=_INK)
    axes.text(0, -0.3, subtitle, fontsize=10.5, color=_SOFT)
    for index, prediction in enumerate(predictions[:shown]):
        left, top = index % columns * _STEP_RIGHT, index // columns * _STEP_DOWN
        _draw(axes, left, top, images[index], prediction, class_names)
    axes.set(xlim=(-_EDGE, width - _EDGE), ylim=(height - _HEAD, -_HEAD), aspect="auto")
    try:
        with atomic_file(path) as file, warnings.catch_warnings():
            # Characters of a file name that the font lacks become boxes.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            metadata = {"Title": title, "Description": subtitle, "Software": None}
            figure.savefig(file, format="png", facecolor=_PAPER, metadata=metadata)
    except OSError as error:
        raise InputError(f"{path}: the image cannot be written ({error.strerror or error})") from error


def _subtitle(predictions: Sequence[DigitPrediction], shown: int) -> str:
    if predictions[0].label is None:
        noted = sum(bool(prediction.note) for prediction in predictions)
        return "predicted class and its probability" + (f"; {noted:,} of all uncertain (?)" if noted else "")
    wrong = [prediction.label != prediction.predicted for prediction in predictions]
    return f"{sum(wrong[:shown]):,} of these wrong (red, with the true class), {sum(wrong):,} of all"


def _draw(
    axes: Axes, left: float, top: float, image: torch.Tensor, prediction: DigitPrediction, names: Sequence[str]
) -> None:
    from matplotlib.patches import Rectangle

    class_name = names[prediction.predicted]
    # No prediction is certain, even if its probability rounds to 100 %.
    share = f"{prediction.probability:.1%}" if prediction.probability < 0.9995 else "> 99.9%"
    line, size, color = "", 7, _UNCERTAIN if prediction.note else None
    if prediction.file is not None:
        line = escape_name(prediction.file.name)
        half = (_MAX_NAME - 1) // 2
        line = line if len(line) <= _MAX_NAME else f"{line[:half]}…{line[-half:]}"
    if prediction.note:
        class_name, share = (NO_INK, "") if prediction.note == NO_INK else (f"{class_name} ?", share)
    elif prediction.label not in {None, prediction.predicted}:
        line, size, color = f"true: {names[prediction.label or 0]}", 10, _WRONG
    # Dark on light, as on paper.
    extent = (left, left + 1, top + 1, top)
    axes.imshow(image.numpy(), cmap="gray_r", vmin=0, vmax=255, extent=extent, aspect="auto")
    width = 2.4 if color else 0.8
    axes.add_patch(Rectangle((left, top), 1, 1, fill=False, edgecolor=color or _HAIR, linewidth=width, zorder=3))
    text: dict[str, Any] = {"parse_math": False}
    axes.text(left, top + 1.2, class_name, fontsize=11.5, fontweight="bold", color=color or _INK, **text)
    axes.text(left + 1, top + 1.2, share, fontsize=9, color=color or _SOFT, ha="right", **text)
    axes.text(left, top + 1.39, line, fontsize=size, color=color or _SOFT, **text)
