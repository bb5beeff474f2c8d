"""The data set `shapes`: images of colored, textured, overlapping shapes, generated once as a VOC folder.

Each image is a function of (seed, number). It uses only sums, products, quotients and square roots, which every machine
rounds alike, so that an image has the same pixels everywhere. The color identifies the class of a shape only in part:
neighboring classes share a third of their hues, so that a network must also learn the outlines.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from lit_mnist.errors import InputError
from lit_mnist.plugins.random_numbers import uniform
from segmentation.images import IGNORED, Pixels
from segmentation.palette import palette_png
from segmentation.verification import content_sha256
from segmentation.voc import IMAGES, LISTS, MASKS, read_splits

# Increase the number with every change of a byte, so that existing folders stay valid.
NAME = "shapes-1"
CLASSES = ("background", "circle", "square", "triangle", "star", "ring", "cross")
TRAIN, TEST, SIDE = 2000, 500, 96
_SEED = 2012
_JPEG_QUALITY = 92
# The file with the digest of the generated files.
_DIGEST = "sha256.txt"
ADVICE = "Delete {} to have the shapes generated again."

_MAX_SHAPES = 4
# Range of the radius of a shape, as shares of the side of the image.
_MIN_RADIUS, _MAX_RADIUS = 0.17, 0.34
# Spread of the hues of a class to both sides, as a share of the distance between two classes.
_HUE_SPREAD = 0.6
_NOISE = 0.12
# Random numbers of an image, and of each of its shapes.
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


def generate_shapes(root: Path) -> Path:
    """Returns the folder `shapes-1` in a folder, and generates it if it is missing, which takes about ten seconds.

    The complete folder is moved into place, so that a process that is killed leaves nothing that counts as the data.

    Raises:
        InputError: The folder cannot be written.
    """
    folder = root / NAME
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=root, prefix=f".{NAME}-") as partial:
                write_shapes(Path(partial) / NAME, train=TRAIN, test=TEST, side=SIDE)
                (Path(partial) / NAME).replace(folder)
    except OSError as error:
        # Another process may have generated the folder meanwhile.
        if not folder.is_dir():
            raise InputError(f"The shapes cannot be written to {folder} ({error}). Set data.root.") from error
    return folder


def check_generated(folder: Path, sha256: str) -> None:
    """Raises InputError if the files of a folder, of which `sha256` is the digest, are not the generated ones."""
    try:
        if (folder / _DIGEST).read_text() == sha256:
            return
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / _DIGEST} cannot be read ({error}). {ADVICE.format(folder)}") from error
    raise InputError(f"{folder}: these are not the generated shapes, but other files. {ADVICE.format(folder)}")


def write_shapes(folder: Path, *, train: int, test: int, side: int) -> None:
    """Writes `train` training images and `test` test images of `side` x `side` pixels as a VOC folder."""
    for subfolder in (LISTS, IMAGES, MASKS):
        (folder / subfolder).mkdir(parents=True)
    names = [f"{number:06}" for number in range(train + test)]
    for number, name in enumerate(names):
        image, mask = make_image(seed=_SEED, number=number, side=side)
        buffer = io.BytesIO()
        # States every setting that another release of the encoder could choose differently.
        Image.fromarray(image).save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling=0, optimize=False)
        (folder / IMAGES / f"{name}.jpg").write_bytes(buffer.getvalue())
        (folder / MASKS / f"{name}.png").write_bytes(palette_png(mask))
    for split, members in (("train", names[:train]), ("val", names[train:])):
        (folder / LISTS / f"{split}.txt").write_text("".join(f"{name}\n" for name in members), encoding="utf-8")
    (folder / _DIGEST).write_text(content_sha256(read_splits(folder)))


def make_image(*, seed: int, number: int, side: int) -> tuple[Pixels, Pixels]:
    """Returns an image, uint8 [side, side, 3], and its mask, uint8 [side, side].

    The pixels of the mask are 0 for the background, 1 to 6 for the shapes, and 255 along each outline, one pixel to
    both sides of it.
    """
    numbers = iter(uniform(seed, "scene", number, np.arange(_DRAWN)).tolist())
    # Positions of the pixels from 0 to 1.
    centers = (np.arange(side) + 0.5) / side
    x, y = np.broadcast_to(centers[None, :], (side, side)), np.broadcast_to(centers[:, None], (side, side))
    shapes = 1 + int(next(numbers) * _MAX_SHAPES)
    image = _texture(3 * x, 3 * y, numbers, hue=next(numbers), saturation=0.15 + 0.35 * next(numbers))
    classes = np.zeros((side, side), np.uint8)
    for shape in range(shapes):
        numbers = iter(uniform(seed, "shape", number, shape, np.arange(_DRAWN)).tolist())
        kind = int(next(numbers) * len(_OUTLINES))
        radius = _MIN_RADIUS + (_MAX_RADIUS - _MIN_RADIUS) * next(numbers)
        right, down = (0.12 + 0.76 * next(numbers) for _ in range(2))
        u, v = _rotate((x - right) / radius, (y - down) / radius, next(numbers))
        inside = _OUTLINES[kind](u, v) < 0
        hue = (kind + 0.5 + _HUE_SPREAD * (2 * next(numbers) - 1)) / len(_OUTLINES) % 1
        image[inside] = _texture(u[inside], v[inside], numbers, hue=hue, saturation=0.55 + 0.45 * next(numbers))
        classes[inside] = kind + 1
    noise = uniform(seed, "noise", number, np.arange(side * side)).reshape(side, side, 1) - 0.5
    levels = np.clip(image + _NOISE * noise, 0, 1) * 255 + 0.5
    return levels.astype(np.uint8), _mark_borders(classes)


def _rotate(x: Floats, y: Floats, share: float) -> tuple[Floats, Floats]:
    """Rotates positions by about `share` of a full turn."""
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


def _texture(u: Floats, v: Floats, numbers: Iterator[float], *, hue: float, saturation: float) -> Floats:
    """Returns colors, float64 [..., 3] from 0 to 1, of a plain, striped, checkered or dotted surface."""
    kind, fineness, light, contrast = int(4 * next(numbers)), 1.5 + 2 * next(numbers), next(numbers), next(numbers)
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
    bright = _hsv_to_rgb(hue, saturation, 0.6 + 0.4 * light)
    dark = bright * (0.45 + 0.4 * contrast)
    return bright + pattern[..., None] * (dark - bright)


def _hsv_to_rgb(hue: float, saturation: float, value: float) -> Floats:
    shares = [min(1.0, max(0.0, abs((6 * hue + turn) % 6 - 3) - 1)) for turn in (0, 4, 2)]
    return np.array([value * (1 - saturation * (1 - share)) for share in shares])


def _mark_borders(classes: Pixels) -> Pixels:
    mask = classes.copy()
    for one, other in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        differ = classes[one] != classes[other]
        mask[one][differ] = IGNORED
        mask[other][differ] = IGNORED
    return mask
