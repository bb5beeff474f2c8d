"""Converts a grey image of one handwritten digit to the format of MNIST.

The brightness of the paper is fitted and subtracted, specks are removed, and thin strokes are thickened. The ink is
then scaled to 20 x 20 pixels and centered by its mass in 28 x 28 pixels, as described at
http://yann.lecun.com/exdb/mnist.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

SIZE = 28
_BOX = 20

_MIN_CONTRAST = 14.0  # grey levels from paper to ink: stains and shadows of a blank page have fewer
_MIN_SEPARATION = 5.0  # the same in standard deviations of the paper: noise alone has about 1.5
_MIN_EXTENT = 5  # pixels: smaller digits cannot be distinguished
_MIN_PART = 0.05  # share of the ink of the largest part: a separate stroke has more, a speck of dust less
# Stroke widths in the box: 1 of 100 MNIST digits has thinner strokes than the first, 1 of 4 than the second.
_THIN, _THICKENED = 1.3, 2.0

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
    if max(digit.shape) < _MIN_EXTENT:
        return None
    return _center(_thicken(digit))


def _extract_ink(grey: Floats) -> Floats | None:
    """Returns the ink, float32 [height, width], 0 for paper and 1 for full ink, or None if there is none.

    Each iteration splits the image by brightness, assumes that the larger part of the image's frame is paper, and fits
    the brightness of the paper. The next iteration subtracts that brightness first, and is more accurate.
    """
    rest = grey - grey.mean()
    for _ in range(3):
        smooth = _smooth(rest)
        light = smooth > _midrange(smooth)
        # Strokes may touch the frame. If they cover half of it, the whole image decides.
        frame = np.concatenate([light[0], light[-1], light[:, 0], light[:, -1]])
        if frame.mean() + 0.1 * light.mean() > 0.55:
            grey, rest, smooth, light = -grey, -rest, -smooth, ~light
        if not light.any() or light.all():
            return None
        base = float(np.median(rest[~light]))
        full = float(np.percentile(rest[light], 80)) - base
        paper = smooth - base < 0.3 * full
        if not paper.any():
            return None
        rest = grey - _fit_paper(grey, paper)
    strong = rest > _midrange(_smooth(rest))
    if not strong.any():
        return None
    full, noise = float(np.percentile(rest[strong], 80)), float(rest[paper].std())
    if full < max(_MIN_CONTRAST, _MIN_SEPARATION * noise):
        return None
    kept = _select_parts(rest > max(0.1 * full, 3.5 * noise), strong)
    return np.where(kept, np.clip(rest / full, 0, 1), 0).astype(np.float32)


def _smooth(values: Floats) -> Floats:
    """Averages 3 x 3 pixels, so that the extremes are ink and paper instead of noise."""
    padded = np.pad(values, 1, mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    means: Floats = (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9
    return means


def _midrange(smooth: Floats) -> float:
    # Unlike a quantile, it also separates few strokes on a large page.
    return (float(smooth.min()) + float(smooth.max())) / 2


def _fit_paper(grey: Floats, paper: Mask) -> Floats:
    """Returns the brightness of the paper, [height, width], by fitting a quadratic polynomial to its pixels."""
    down, right = (np.linspace(-1, 1, length) for length in grey.shape)
    # About 10,000 pixels are enough for six coefficients.
    step = math.ceil(math.sqrt(grey.size / 10_000))
    if not paper[::step, ::step].any():
        step = 1
    row, column = np.nonzero(paper[::step, ::step])
    y, x = down[::step][row], right[::step][column]
    matrix = np.stack([np.ones_like(x), y, y * y, x, x * x, x * y], axis=1)
    # Regularization keeps the fit stable if the digit covers most of the image.
    ridge = np.diag([0.0, 1, 1, 1, 1, 1]) * 0.002 * len(matrix)
    level, y1, y2, x1, x2, xy = np.linalg.solve(matrix.T @ matrix + ridge, matrix.T @ grey[::step, ::step][row, column])
    of_rows, of_columns = level + y1 * down + y2 * down * down, x1 * right + x2 * right * right
    slopes = np.outer((xy * down).astype(np.float32), right.astype(np.float32))
    light: Floats = slopes + of_rows.astype(np.float32)[:, None] + of_columns.astype(np.float32)
    return light


def _select_parts(weak: Mask, strong: Mask) -> Mask:
    """Returns the connected parts (8 neighbors) of the mask `weak` that contain enough strong pixels.

    Union-find joins runs of pixels along the rows; an image has far fewer runs than pixels.
    """
    padded = np.pad(weak, ((0, 0), (1, 1)))
    stride = padded.shape[1]
    flat = padded.ravel().astype(np.int8)
    starts, ends = np.flatnonzero(np.diff(flat) == 1) + 1, np.flatnonzero(np.diff(flat) == -1) + 1
    # The runs of the row above that touch a run are consecutive.
    first = np.searchsorted(ends, starts - stride, side="left")
    last = np.searchsorted(starts, ends - stride, side="right")
    parent = list(range(len(starts)))

    def root(run: int) -> int:
        while parent[run] != run:
            parent[run] = parent[parent[run]]
            run = parent[run]
        return run

    for run, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        for above in range(begin, end):
            parent[root(above)] = root(run)
    part = np.repeat(np.array([root(run) for run in range(len(parent))], dtype=np.int64), ends - starts)
    size = np.bincount(part, weights=strong[weak], minlength=1)
    kept = np.zeros_like(weak)
    kept[weak] = (size >= max(1.0, _MIN_PART * float(size.max())))[part]
    return kept


def _thicken(digit: Floats) -> Floats:
    """Widens the strokes of a thin pen on a large page, which would be too pale after scaling to 20 pixels."""
    scale = max(digit.shape) / _BOX
    inside = np.pad(digit > 0.5, 1)
    edges = int((inside[1:] != inside[:-1]).sum()) + int((inside[:, 1:] != inside[:, :-1]).sum())
    # The area of a stroke is its length times its width. Pixel edges overestimate a slanted outline by 4/pi.
    width = 2 * int(inside.sum()) / max(1.0, edges * math.pi / 4)
    growth = round((_THICKENED * scale - width) / 2) if width < _THIN * scale else 0
    digit = np.pad(digit, growth)
    for step in range(growth):
        padded = np.pad(digit, 1)
        tall = np.maximum(np.maximum(padded[:-2], padded[1:-1]), padded[2:])
        wide = np.maximum(np.maximum(padded[:, :-2], padded[:, 1:-1]), padded[:, 2:])
        square = np.maximum(np.maximum(tall[:, :-2], tall[:, 1:-1]), tall[:, 2:])
        # Alternating a cross and a square grows an octagon, which is nearly round.
        digit = square if step % 2 else np.maximum(tall[:, 1:-1], wide[1:-1])
    return digit


def _center(digit: Floats) -> Digit:
    """Scales the ink to the box and centers it in the image, uint8 [28, 28], in one antialiased resampling.

    The digit moves by whole pixels, so that its center of mass is at most half a pixel from the middle of the pixel
    [14, 14], as in the data set. The images of the data set therefore do not move.
    """
    scale = max(digit.shape) / _BOX
    begin, after = [], []
    for axis, length in enumerate(digit.shape):
        mass = digit.sum(axis=1 - axis)
        center = float(mass @ (np.arange(length) + 0.5)) / float(mass.sum()) / scale
        # Both ends stay inside, even if the mass is far to one end.
        place = min(max(math.ceil(SIZE / 2 - center), 0), math.floor(SIZE - length / scale))
        begin.append(place * scale)
        after.append((SIZE - place) * scale - length)
    margins = [(math.ceil(low), math.ceil(high) + 1) for low, high in zip(begin, after, strict=True)]
    top, left = (margin[0] - low for margin, low in zip(margins, begin, strict=True))
    page = Image.fromarray(np.pad(digit, margins))
    edge = SIZE * scale
    field = np.asarray(page.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=(left, top, left + edge, top + edge)))
    return np.rint(np.clip(field / max(0.5, float(field.max())), 0, 1) * 255).astype(np.uint8)
