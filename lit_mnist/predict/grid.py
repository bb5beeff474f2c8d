"""Predictions as a picture: a grid of digits, each with its class and probability, the wrong ones in red."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lit_mnist.errors import InputError
from lit_mnist.training.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lengths in units: a picture is a square of 1 x 1, its two lines of text lie below it.
_COLUMNS = 10
_STEP_RIGHT, _STEP_DOWN = 1.16, 1.54
_HEAD, _EDGE = 1.06, 0.4  # above the pictures, and around them
_LEAST_WIDTH = 4.6  # so that the title fits over a lone picture
_INCHES, _DPI = 14 / 15, 150  # a unit is 140 pixels: 5 for each of a digit's 28
_INK, _SOFT, _WRONG, _HAIR, _PAPER = "#1c1f23", "#666c74", "#c8281e", "#dcdcd6", "#fcfcfa"


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
    # matplotlib takes half a second to import, which every other command would pay for.
    from matplotlib.figure import Figure

    names = [str(name) for name in class_names] if class_names is not None else []
    # Long names share a line with the probability too: the pictures grow with them, the letters do not.
    inches = _INCHES * max(1.0, 0.6 + 0.1 * max(map(len, names), default=0))
    columns = min(shown, max(_COLUMNS, math.isqrt(shown)))
    width = max((columns - 1) * _STEP_RIGHT + 1, _LEAST_WIDTH) + 2 * _EDGE
    height = math.ceil(shown / columns) * _STEP_DOWN + _HEAD + _EDGE / 2
    figure = Figure(figsize=(width * inches, height * inches), dpi=_DPI, facecolor=_PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    title = f"Showing {shown:,} of {len(images):,} pictures"
    axes.text(0, -0.62, title, fontsize=17, fontweight="bold", color=_INK)
    subtitle = _subtitle(predicted, labels, shown)
    axes.text(0, -0.3, subtitle, fontsize=10.5, color=_SOFT)
    for index in range(shown):
        corner = (index % columns * _STEP_RIGHT, index // columns * _STEP_DOWN)
        guess, truth = int(predicted[index]), None if labels is None else int(labels[index])
        mistaken_for = None if truth is None or truth == guess else _name(truth, names)
        _draw_picture(axes, corner, images[index], wrong=mistaken_for is not None)
        _write_caption(axes, corner, _name(guess, names), float(probability[index]), mistaken_for)
    axes.set(xlim=(-_EDGE, width - _EDGE), ylim=(height - _HEAD, -_HEAD), aspect="auto")
    _save(figure, path, {"Title": title, "Description": subtitle, "Software": None})


def _save(figure: Figure, path: Path, metadata: dict[str, str | None]) -> None:
    try:
        with whole_file(path) as file:
            figure.savefig(file, format="png", facecolor=_PAPER, metadata=metadata)
    except OSError as error:
        raise InputError(f"{path}: the picture cannot be written ({error.strerror or error})") from error


def _name(index: int, names: Sequence[str]) -> str:
    return names[index] if names else str(index)


def _subtitle(predicted: torch.Tensor, labels: torch.Tensor | None, shown: int) -> str:
    if labels is None:
        return "predicted class and its probability"
    wrong = labels != predicted
    return f"{int(wrong[:shown].sum()):,} of these wrong (red, with the true class), {int(wrong.sum()):,} of all"


def _draw_picture(axes: Axes, corner: tuple[float, float], image: torch.Tensor, *, wrong: bool) -> None:
    from matplotlib.patches import Rectangle

    left, top = corner
    # Dark on light, as on paper: a page of black squares is hard on the eye.
    pixels = image.numpy()
    axes.imshow(pixels, cmap="gray_r", vmin=0, vmax=255, extent=(left, left + 1, top + 1, top), aspect="auto")
    colour, line = (_WRONG, 2.4) if wrong else (_HAIR, 0.8)
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=line, zorder=3))


def _write_caption(axes: Axes, corner: tuple[float, float], name: str, probability: float, truth: str | None) -> None:
    left, line = corner[0], corner[1] + 1.2
    ink, soft = (_INK, _SOFT) if truth is None else (_WRONG, _WRONG)
    # What rounds to 100 % is not certain.
    share = f"{probability:.1%}" if probability < 0.9995 else "> 99.9%"
    axes.text(left, line, name, fontsize=11.5, fontweight="bold", color=ink, parse_math=False)
    axes.text(left + 1, line, share, fontsize=9, color=soft, ha="right", parse_math=False)
    if truth is not None:
        axes.text(left, line + 0.19, f"true: {truth}", fontsize=10, color=_WRONG, parse_math=False)
