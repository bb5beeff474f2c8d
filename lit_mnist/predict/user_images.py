"""Finds a user's images on the disk, and converts digits to the format of MNIST.

    >>> digits = read_digits(find_images([Path("scans")]))  # uint8 [N, 28, 28]

An image that cannot be read is an error: no image is skipped silently.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps

from lit_mnist.data.image_files import USER_FORMATS, open_image
from lit_mnist.errors import InputError
from lit_mnist.experiment.registry import DATASETS
from lit_mnist.predict.fit_digit import SIZE, Floats, fit_digit

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
# Larger images are reduced to this many pixels along the longer side.
_WORKING_SIDE = 1024
# A pixel with at least this share of the highest opacity covers the paper.
_OPAQUE = 0.9

Value = TypeVar("Value")


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Lists image files.

    Args:
        paths: Files with any name, and folders, which are searched recursively for names that end in one of `SUFFIXES`.
            Hidden files and folders are skipped; links to folders are not followed.

    Returns:
        The files in the order of `paths`; those of a folder are sorted.

    Raises:
        InputError: A folder cannot be read or contains no image.
    """
    return [file for path in paths for file in (_search(path) if os.path.isdir(path) else [path])]  # noqa: PTH112


def _search(folder: Path) -> list[Path]:
    def stop(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(place, name) for name in names if not name.startswith("."))
        found.extend(file for file in files if file.suffix.lower() in SUFFIXES)
    if not found:
        raise InputError(f"{folder}: no image in this folder (looked for {', '.join(sorted(SUFFIXES))})")
    return sorted(found)


def _unreadable(path: Path, error: OSError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file or folder")
    if isinstance(error, PermissionError):
        return InputError(f"{path}: no permission to read it")
    return InputError(f"{path}: cannot be read ({error.strerror or error})")


def read_all(files: Sequence[Path], read: Callable[[Path], Value]) -> list[Value]:
    """Calls `read` with each file; raises one InputError that names all files that cannot be read."""
    values, failures = [], []
    for file in files:
        try:
            # Opening a pipe or a device could wait forever.
            if not stat.S_ISREG(file.stat().st_mode):
                raise InputError(f"{file}: neither a file nor a folder")
            with file.open("rb"):
                pass
            values.append(read(file))
        except OSError as error:
            failures.append(str(_unreadable(file, error)))
        except InputError as error:
            failures.append(str(error))
    if failures:
        several = f"{len(failures)} of {len(files)} images cannot be read: " if len(failures) > 1 else ""
        raise InputError(several + "; ".join(failures))
    return values


def read_digits(paths: Sequence[Path]) -> torch.Tensor:
    """Reads images of one digit each, of any mode and size, dark on light or light on dark.

    A transparent image is put on white paper, or on black paper if everything on it is light. An image is rotated by
    its EXIF data. One image is in memory at a time.

    Returns:
        The digits in the format of MNIST, uint8 [N, 28, 28], light on black; an image without ink is all 0.

    Raises:
        InputError: Files cannot be read or decoded, or have more than 50 megapixels or several pages; names all files.
    """
    digits = np.zeros((len(paths), SIZE, SIZE), np.uint8)
    for row, digit in zip(digits, read_all(paths, lambda path: fit_digit(_read_grey(path))), strict=True):
        if digit is not None:
            row[:] = digit
    return torch.from_numpy(digits)


def read_images(paths: Sequence[Path], data_name: str) -> torch.Tensor:
    """Reads images of the kind of a data set: digits are cut out, those of a registered data set only scaled.

    Returns:
        Grey values, uint8 [N, 28, 28].

    Raises:
        InputError: As for `read_digits`.
    """
    if data_name not in DATASETS:
        return read_digits(paths)
    images = read_all(paths, lambda path: _scale(_read_grey(path)))
    return torch.from_numpy(np.stack(images) if images else np.zeros((0, SIZE, SIZE), np.uint8))


def _scale(grey: Floats) -> npt.NDArray[np.uint8]:
    scaled = Image.fromarray(grey).resize((SIZE, SIZE), Image.Resampling.BOX)
    return np.asarray(scaled).round().clip(0, 255).astype(np.uint8)


def _read_grey(path: Path) -> Floats:
    """Decodes an image to grey values, float32 [height, width] from 0 to 255, in the working size."""
    with open_image(path, USER_FORMATS) as image:
        # A JPEG is decoded at a fraction of its size.
        image.draft("L", (_WORKING_SIDE, _WORKING_SIDE))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        factor = -(-max(image.size) // _WORKING_SIDE)
        if image.mode.startswith("I") or image.mode == "F":
            return np.asarray(_stretch(image).reduce(factor))
        if image.has_transparency_data:
            colors = image.convert("RGBA").reduce(factor)
            grey = Image.alpha_composite(Image.new("RGBA", colors.size, _choose_paper(colors)), colors)
        elif image.mode == "LAB":
            grey = image.getchannel("L").reduce(factor)
        else:
            grey = (image if image.mode == "L" else image.convert("RGB")).reduce(factor)
        return np.asarray(grey.convert("L"), dtype=np.float32)


def _choose_paper(image: Image.Image) -> str:
    """Returns the color of the paper on which a transparent image, RGBA, is visible."""
    grey, alpha = np.moveaxis(np.asarray(image.convert("LA")), 2, 0)
    return "black" if int(grey[alpha >= _OPAQUE * alpha.max()].min()) > 127 else "white"


def _stretch(image: Image.Image) -> Image.Image:
    """Scales values of more than 8 bits to 0 to 255: white may be the maximum of 10, 12 or 16 bits, or 1.0."""
    values = np.asarray(image).astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("a value is not finite")
    low, high = float(values.min()), float(values.max())
    return Image.fromarray((values - low) * (255 / max(high - low, 1e-30)))
