"""Converts a grey image of one handwritten digit to the format of MNIST.

The ink is made light on black, cropped, scaled to 20 x 20 pixels, and centered by its mass in 28 x 28 pixels, as
described at http://yann.lecun.com/exdb/mnist.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

SIZE = 28
_BOX = 20

_MIN_CONTRAST = 14.0  # grey levels from paper to ink: shadows on a blank page have fewer
_MIN_SEPARATION = 5.0  # the same in standard deviations of the paper: noise alone has about 1.5
_MIN_EXTENT = 5  # pixels: smaller digits cannot be distinguished

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Digit = npt.NDArray[np.uint8]


def fit_digit(grey: Floats) -> Digit | None:
    """Extracts the ink of one digit, light on black, 20 pixels long and centered by its mass.

    Args:
        grey: The image, float32 [height, width] from 0 (black) to 255 (white), dark on light or light on dark.

    Returns:
        The digit, uint8 [28, 28], or None if there is no ink.
    """
    ink = _extract_ink(grey)
    if ink is None:
        return None
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    digit = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return _center(digit) if max(digit.shape) >= _MIN_EXTENT else None


def _extract_ink(grey: Floats) -> Floats | None:
    """Returns the ink, float32 [height, width], 0 for paper and 1 for full ink, or None if there is none."""
    frame = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    rest, paper = grey - np.median(frame), np.ones_like(grey, dtype=bool)
    # The second time, uneven light no longer hides which pixels are paper.
    for _ in range(2):
        smooth = _smooth(rest)
        if -smooth.min() > smooth.max():
            grey, rest, smooth = -grey, -rest, -smooth
        paper = smooth < smooth.max() / 2
        if not paper.any():
            return None
        rest = grey - _light(grey, paper)
    smooth = _smooth(rest)
    strong = smooth > smooth.max() / 2
    full = float(np.percentile(rest[strong], 80)) if strong.any() else 0.0
    # The standard deviation of Gaussian noise, from the median, on which the edges of the strokes have no influence.
    noise = 1.48 * float(np.median(np.abs(rest[paper])))
    if full < max(_MIN_CONTRAST, _MIN_SEPARATION * noise):
        return None
    # Single pixels of noise are far from the strokes; the pale edges of the strokes are not.
    near = _smooth(_smooth(_smooth(strong.astype(np.float32)))) > 0
    return np.where(near & (rest > max(0.1 * full, 3.5 * noise)), np.clip(rest / full, 0, 1), 0).astype(np.float32)


def _smooth(values: Floats) -> Floats:
    """Averages 3 x 3 pixels, so that the extremes are ink and paper instead of noise."""
    padded = np.pad(values, 1, mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    means: Floats = (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9
    return means


def _light(grey: Floats, paper: Mask) -> Floats:
    """Returns the brightness of the paper, [height, width], as a linear function of the place."""
    down, right = (np.linspace(-1, 1, length) for length in grey.shape)
    # About 10,000 pixels are enough for three coefficients.
    step = math.ceil(math.sqrt(grey.size / 10_000))
    row, column = np.nonzero(paper[::step, ::step])
    places = np.stack([np.ones(len(row)), down[::step][row], right[::step][column]], axis=1)
    level, slope_down, slope_right = np.linalg.lstsq(places, grey[::step, ::step][row, column], rcond=None)[0]
    light: Floats = (level + slope_down * down[:, None] + slope_right * right).astype(np.float32)
    return light


def _center(digit: Floats) -> Digit:
    """Scales the ink to the box and centers it in the image, uint8 [28, 28].

    The digit moves by whole pixels, so that its center of mass is at most half a pixel from the middle of the pixel
    [14, 14], as in the data set. The images of the data set therefore do not move.
    """
    scale = max(digit.shape) / _BOX
    height, width = (max(1, round(length / scale)) for length in digit.shape)
    scaled = np.asarray(Image.fromarray(digit).resize((width, height), Image.Resampling.BICUBIC)).clip(0)
    # The strokes of a thin pen on a large page are pale after the scaling.
    scaled = np.clip(scaled / np.median(scaled[scaled > scaled.max() / 2]), 0, 1)
    page = np.zeros((SIZE, SIZE))
    corner = []
    for axis, length in enumerate(scaled.shape):
        mass = scaled.sum(axis=1 - axis)
        center = float(mass @ (np.arange(length) + 0.5) / mass.sum())
        corner.append(min(max(math.ceil(SIZE / 2 - center), 0), SIZE - length))
    page[corner[0] : corner[0] + height, corner[1] : corner[1] + width] = scaled
    return np.rint(page * 255).astype(np.uint8)
