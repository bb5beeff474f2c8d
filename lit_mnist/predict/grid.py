"""Predictions as a image: a grid of digits, each with its class and probability, the wrong ones in red.

A user's own images have the names of their files below them, and a question mark where the prediction is uncertain.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.errors import InputError
from lit_mnist.predict.answers import visible
from lit_mnist.predict.doubts import NO_INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lengths in units: a image is a square of 1 x 1, its two lines of text lie below it.
_COLUMNS = 10
_STEP_RIGHT, _STEP_DOWN = 1.16, 1.54
_HEAD, _EDGE = 1.06, 0.4  # above the images, and around them
_LEAST_WIDTH = 4.6  # so that the title fits over a lone image
_INCHES, _DPI = 14 / 15, 150  # a unit is 140 pixels: 5 for each of a digit's 28
_INK, _SOFT, _WRONG, _HAIR, _PAPER = "#1c1f23", "#666c74", "#c8281e", "#dcdcd6", "#fcfcfa"
_UNCERTAIN = "#b06a00"
_LONGEST_NAME = 15  # of a file, in letters: more do not fit below a image


def draw_grid(
    path: Path,
    images: torch.Tensor,
    predicted: torch.Tensor,
    probability: torch.Tensor,
    labels: torch.Tensor | None = None,
    class_names: Sequence[str] | None = None,
    files: Sequence[Path] | None = None,
    notes: Sequence[str] | None = None,
    limit: int = 100,
) -> None:
    """Draws the first digits with what was predicted for them, as a PNG image.

    A reader sees the old image or the whole new one, never a part.

    Args:
        path: The PNG file; its folder must exist.
        images: The digits, uint8 [N, 28, 28], light ink on black.
        predicted: The predicted classes, integers [N].
        probability: The softmax probability of each predicted class, float [N].
        labels: The true classes, integers [N]; None where they are not known.
        class_names: The name of each class; None shows its number.
        files: The files that the digits come from, whose names are shown; None where they come from a data set.
        notes: What speaks against each prediction; see `doubts`.
        limit: How many digits are shown at most.

    Raises:
        ValueError: The lengths differ, or there is no digit to show.
        InputError: The file cannot be written.
    """
    for column in (predicted, probability, labels, files, notes):
        if column is not None and len(column) != len(images):
            raise ValueError(f"{len(images)} images, but a column of {len(column)}")
    shown = min(len(images), limit)
    if shown < 1:
        raise ValueError("no digit to show")
    # matplotlib takes half a second to import, which every other command would pay for.
    from matplotlib.figure import Figure

    names = [str(name) for name in class_names] if class_names is not None else []
    # Long names share a line with the probability too: the images grow with them, the letters do not.
    inches = _INCHES * max(1.0, 0.6 + 0.1 * max(map(len, names), default=0))
    columns = min(shown, max(_COLUMNS, math.isqrt(shown)))
    width = max((columns - 1) * _STEP_RIGHT + 1, _LEAST_WIDTH) + 2 * _EDGE
    height = math.ceil(shown / columns) * _STEP_DOWN + _HEAD + _EDGE / 2
    figure = Figure(figsize=(width * inches, height * inches), dpi=_DPI, facecolor=_PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    title = f"Showing {shown:,} of {len(images):,} images"
    axes.text(0, -0.62, title, fontsize=17, fontweight="bold", color=_INK)
    subtitle = _subtitle(predicted, labels, notes, shown)
    axes.text(0, -0.3, subtitle, fontsize=10.5, color=_SOFT)
    for index in range(shown):
        corner = (index % columns * _STEP_RIGHT, index // columns * _STEP_DOWN)
        guess, truth = _name(predicted[index], names), None if labels is None else _name(labels[index], names)
        note, file = "" if notes is None else notes[index], None if files is None else files[index]
        caption = _caption(guess, float(probability[index]), truth, note, file)
        _draw_picture(axes, corner, images[index], caption.color)
        _write_caption(axes, corner, caption)
    axes.set(xlim=(-_EDGE, width - _EDGE), ylim=(height - _HEAD, -_HEAD), aspect="auto")
    _save(figure, path, {"Title": title, "Description": subtitle, "Software": None})


def _save(figure: Figure, path: Path, metadata: dict[str, str | None]) -> None:
    try:
        with atomic_file(path) as file, warnings.catch_warnings():
            # A file's name may have letters that the font lacks: a box stands for each.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(file, format="png", facecolor=_PAPER, metadata=metadata)
    except OSError as error:
        raise InputError(f"{path}: the image cannot be written ({error.strerror or error})") from error


def _name(index: torch.Tensor, names: Sequence[str]) -> str:
    return names[int(index)] if names else str(int(index))


def _subtitle(predicted: torch.Tensor, labels: torch.Tensor | None, notes: Sequence[str] | None, shown: int) -> str:
    if labels is None:
        noted = sum(map(bool, notes or ()))
        return "predicted class and its probability" + (f"; {noted:,} of all uncertain (?)" if noted else "")
    wrong = labels != predicted
    return f"{int(wrong[:shown].sum()):,} of these wrong (red, with the true class), {int(wrong.sum()):,} of all"


class _Caption(NamedTuple):
    """What stands below a image, in a colour of its own where something is the matter: two words and a line."""

    name: str
    share: str
    line: str
    color: str | None


def _caption(guess: str, probability: float, truth: str | None, note: str, file: Path | None) -> _Caption:
    # What rounds to 100 % is not certain.
    share = f"{probability:.1%}" if probability < 0.9995 else "> 99.9%"
    if truth is not None and truth != guess:
        return _Caption(guess, share, f"true: {truth}", _WRONG)
    line = _shortened(visible(file.name)) if file is not None else ""
    if note == NO_INK:
        return _Caption(note, "", line, _UNCERTAIN)
    return _Caption(f"{guess} ?" if note else guess, share, line, _UNCERTAIN if note else None)


def _shortened(name: str) -> str:
    half = (_LONGEST_NAME - 1) // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def _draw_picture(axes: Axes, corner: tuple[float, float], image: torch.Tensor, color: str | None) -> None:
    from matplotlib.patches import Rectangle

    left, top = corner
    # Dark on light, as on paper: a page of black squares is hard on the eye.
    pixels = image.numpy()
    axes.imshow(pixels, cmap="gray_r", vmin=0, vmax=255, extent=(left, left + 1, top + 1, top), aspect="auto")
    width = 2.4 if color else 0.8
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=color or _HAIR, linewidth=width, zorder=3))


def _write_caption(axes: Axes, corner: tuple[float, float], caption: _Caption) -> None:
    left, top = corner[0], corner[1] + 1.2
    name, share, line, color = caption
    axes.text(left, top, name, fontsize=11.5, fontweight="bold", color=color or _INK, parse_math=False)
    axes.text(left + 1, top, share, fontsize=9, color=color or _SOFT, ha="right", parse_math=False)
    size = 10 if color == _WRONG else 7
    axes.text(left, top + 0.19, line, fontsize=size, color=color or _SOFT, parse_math=False)
