"""Images of colored, textured, overlapping shapes, computed from numbers: `make_image(seed=0, number=7, side=96)`.

Each image is a function of (seed, number). It uses only sums, products, quotients and square roots, which every machine
rounds alike, so that an image has the same bytes everywhere. The color tells the class of a shape only in part:
neighboring classes share a third of their hues, so that a network must also learn the outlines.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lit_mnist.data.rng import uniform
from lit_mnist.data.segmentation.augmentation import IGNORED

_MAX_SHAPES = 4
# Range of the radius of a shape, as shares of the side of the image.
_MIN_RADIUS, _MAX_RADIUS = 0.17, 0.34
# Spread of the hues of a class to both sides, as a share of the distance between two classes.
_HUE_SPREAD = 0.6
_NOISE = 0.12
# Random numbers for an image, and for each of its shapes.
_DRAWN = 16
# Unit vectors for the lines of a star (90, 162, 234, 306 and 18 degrees) and of a triangle (90, 210 and 330 degrees).
_FIVE = (
    (0.0, 1.0),
    (-0.9510565162951535, 0.30901699437494745),
    (-0.5877852522924731, -0.8090169943749475),
    (0.5877852522924731, -0.8090169943749475),
    (0.9510565162951535, 0.30901699437494745),
)
_THREE = ((0.0, 1.0), (-0.8660254037844386, -0.5), (0.8660254037844386, -0.5))

Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]


def make_image(*, seed: int, number: int, side: int) -> tuple[Pixels, Pixels]:
    """Returns an image, uint8 [side, side, 3], and its mask, uint8 [side, side].

    The pixels of the mask are 0 for the background, 1 to 6 for the shapes, and 255 along each outline, one pixel to
    both sides of it.

    Args:
        seed: Seed of the set.
        number: Number of the image in the set, from 0.
        side: Height and width in pixels.
    """
    draw = iter(uniform(seed, "scene", number, np.arange(_DRAWN)).tolist())
    x, y = _grid(side)
    shapes = 1 + int(next(draw) * _MAX_SHAPES)
    image = _textured(3 * x, 3 * y, draw, hue=next(draw), saturation=0.15 + 0.35 * next(draw))
    classes = np.zeros((side, side), np.uint8)
    for shape in range(shapes):
        draw = iter(uniform(seed, "shape", number, shape, np.arange(_DRAWN)).tolist())
        kind = int(next(draw) * len(_OUTLINES))
        radius = _MIN_RADIUS + (_MAX_RADIUS - _MIN_RADIUS) * next(draw)
        right, down = (0.12 + 0.76 * next(draw) for _ in range(2))
        u, v = _turned((x - right) / radius, (y - down) / radius, next(draw))
        inside = _OUTLINES[kind](u, v) < 0
        hue = (kind + 0.5 + _HUE_SPREAD * (2 * next(draw) - 1)) / len(_OUTLINES) % 1
        image[inside] = _textured(u[inside], v[inside], draw, hue=hue, saturation=0.55 + 0.45 * next(draw))
        classes[inside] = kind + 1
    noise = uniform(seed, "noise", number, np.arange(side * side)).reshape(side, side, 1) - 0.5
    levels = np.clip(image + _NOISE * noise, 0, 1) * 255 + 0.5
    return levels.astype(np.uint8), _with_border(classes)


def _grid(side: int) -> tuple[Floats, Floats]:
    """Returns the positions of the pixels, x and y, from 0 to 1."""
    place = (np.arange(side) + 0.5) / side
    return np.broadcast_to(place[None, :], (side, side)), np.broadcast_to(place[:, None], (side, side))


def _turned(x: Floats, y: Floats, share: float) -> tuple[Floats, Floats]:
    """Rotates positions by a share of a full turn, from 0 to 1; the angle does not grow evenly with the share."""
    quarter, tangent = divmod(4 * share, 1)
    # The tangent of half the angle gives sine and cosine without functions that machines round differently.
    length = 1 + tangent * tangent
    cosine, sine = (1 - tangent * tangent) / length, 2 * tangent / length
    for _ in range(int(quarter)):
        cosine, sine = -sine, cosine
    return cosine * x + sine * y, cosine * y - sine * x


def _circle(u: Floats, v: Floats) -> Floats:
    return np.sqrt(u * u + v * v) - 0.9


def _square(u: Floats, v: Floats) -> Floats:
    return np.maximum(abs(u), abs(v)) - 0.78


def _triangle(u: Floats, v: Floats) -> Floats:
    return np.max([-(u * right + v * down) for right, down in _THREE], axis=0) - 0.55


def _star(u: Floats, v: Floats) -> Floats:
    # A position is inside a pentagram if it is inside four of its five lines.
    lines = np.sort([-(u * right + v * down) for right, down in _FIVE], axis=0)
    return lines[-2] - 0.31


def _ring(u: Floats, v: Floats) -> Floats:
    distance = np.sqrt(u * u + v * v)
    return np.maximum(distance - 0.98, 0.52 - distance)


def _cross(u: Floats, v: Floats) -> Floats:
    across, along = np.minimum(abs(u), abs(v)), np.maximum(abs(u), abs(v))
    return np.maximum(across - 0.34, along - 0.98)


# Functions of the position in units of the radius, negative inside; the first is class 1, after the background.
_OUTLINES = (_circle, _square, _triangle, _star, _ring, _cross)


def _textured(u: Floats, v: Floats, draw: Iterator[float], *, hue: float, saturation: float) -> Floats:
    """Returns colors, float64 [..., 3] from 0 to 1, of a plain, striped, checkered or dotted surface."""
    kind, fineness, light, contrast = int(4 * next(draw)), 1.5 + 2 * next(draw), next(draw), next(draw)
    across, along = u * fineness, v * fineness
    if kind == 0:
        pattern = np.clip(0.5 + 0.3 * u, 0, 1)
    elif kind == 1:
        pattern = (across - np.floor(across) < 0.5).astype(np.float64)
    elif kind == 2:
        pattern = ((np.floor(across) + np.floor(along)).astype(np.int64) & 1).astype(np.float64)
    else:
        right, down = across - np.floor(across) - 0.5, along - np.floor(along) - 0.5
        pattern = (right * right + down * down < 0.08).astype(np.float64)
    bright = _color(hue, saturation, 0.6 + 0.4 * light)
    dark = bright * (0.45 + 0.4 * contrast)
    return bright + pattern[..., None] * (dark - bright)


def _color(hue: float, saturation: float, value: float) -> Floats:
    """Converts hue, saturation and value to red, green and blue, all from 0 to 1."""
    shares = [min(1.0, max(0.0, abs((6 * hue + turn) % 6 - 3) - 1)) for turn in (0, 4, 2)]
    return np.array([value * (1 - saturation * (1 - share)) for share in shares])


def _with_border(classes: Pixels) -> Pixels:
    """Returns a mask in which the pixels that touch another class have no class."""
    mask = classes.copy()
    for one, other in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        differ = classes[one] != classes[other]
        mask[one][differ] = IGNORED
        mask[other][differ] = IGNORED
    return mask
