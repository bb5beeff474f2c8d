"""Images of handwritten digits, found on the disk and read as MNIST would show them.

    >>> digits = read_digits(find_images([Path("scans")]))  # uint8 [N, 28, 28]

What cannot be read is refused by name: a prediction for something else than the user's image is worse than none.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps

from lit_mnist.data.image_files import open_image
from lit_mnist.errors import InputError
from lit_mnist.predict.digit import FIELD, Field, Floats, fit_digit

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
# A digit is looked for in at most so many pixels along the longer side.
_WORKING_SIDE = 1024
# Of the highest opacity: what covers the paper, and not an edge that fades.
_OPAQUE = 0.9

Value = TypeVar("Value")


def find_images(paths: Sequence[Path]) -> list[Path]:
    """Lists image files.

    Args:
        paths: Files, taken whatever their names are, and folders, searched with their subfolders for names that end as
            images do (see `SUFFIXES`). Hidden files and folders are left out, links to folders not followed.

    Returns:
        The files in the order of `paths`, those of one folder sorted. Whether they can be read is seen by `read_all`.

    Raises:
        InputError: A folder may not be read or holds no image.
    """
    return [file for path in paths for file in (_in_folder(path) if os.path.isdir(path) else [path])]  # noqa: PTH112


def _in_folder(folder: Path) -> list[Path]:
    def stop(error: OSError) -> None:
        raise _refused(Path(error.filename), error) from error

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(place, name) for name in names if not name.startswith("."))
        found.extend(file for file in files if file.suffix.lower() in SUFFIXES)
    if not found:
        raise InputError(f"{folder}: no image in this folder (looked for {', '.join(sorted(SUFFIXES))})")
    return sorted(found)


def _check_readable(path: Path) -> None:
    try:
        # Opening a pipe or a device could wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path}: neither a file nor a folder")
        with path.open("rb"):
            pass
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path}: no such file or folder")
    if isinstance(error, PermissionError):
        return InputError(f"{path}: no permission to read it")
    return InputError(f"{path}: cannot be read ({error.strerror or error})")


def read_all(files: Sequence[Path], read: Callable[[Path], Value]) -> list[Value]:
    """Reads files, each by `read`.

    Raises:
        InputError: One or more of them cannot be read; the message names all of these.
    """
    values, wrong = [], []
    for file in files:
        try:
            _check_readable(file)
            values.append(read(file))
        except InputError as error:
            wrong.append(str(error))
    if wrong:
        several = f"{len(wrong)} of {len(files)} images cannot be read: " if len(wrong) > 1 else ""
        raise InputError(several + "; ".join(wrong))
    return values


def read_digits(paths: Sequence[Path]) -> torch.Tensor:
    """Reads images of one digit each, of any mode and size, dark on light or light on dark.

    Transparency is taken as white paper, or as black paper where all that covers it is light. A image is turned as
    its EXIF data say. One image is held at a time.

    Args:
        paths: Image files, such as `find_images` returns.

    Returns:
        The digits in MNIST's convention, uint8 [N, 28, 28], light ink on black; an image without ink is all 0.

    Raises:
        InputError: Files cannot be read or decoded, have more than 50 megapixels or several pages; it names them all.
    """
    digits = np.zeros((len(paths), FIELD, FIELD), np.uint8)
    for field, digit in zip(digits, read_all(paths, _read_digit), strict=True):
        if digit is not None:
            field[:] = digit
    return torch.from_numpy(digits)


def _read_digit(path: Path) -> Field | None:
    return fit_digit(_read_grey(path))


def _read_grey(path: Path) -> Floats:
    """Decodes a image into grey values, float32 [height, width] from 0 to 255, reduced to a working size."""
    with open_image(path, FORMATS) as image:
        return _grey(image)


def _grey(image: Image.Image) -> Floats:
    # A JPEG is decoded at a fraction of its size where that is enough.
    image.draft("L", (_WORKING_SIDE, _WORKING_SIDE))
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    factor = -(-max(image.size) // _WORKING_SIDE)
    if image.mode.startswith("I") or image.mode == "F":
        return np.asarray(_deep(image).reduce(factor))
    if image.has_transparency_data:
        image = image.convert("RGBA").reduce(factor)
        image = Image.alpha_composite(Image.new("RGBA", image.size, _paper_below(image)), image)
    elif image.mode == "LAB":
        image = image.getchannel("L").reduce(factor)
    else:
        image = (image if image.mode == "L" else image.convert("RGB")).reduce(factor)
    return np.asarray(image.convert("L"), dtype=np.float32)


def _paper_below(image: Image.Image) -> str:
    """Returns the color of the paper on which a transparent image, RGBA, can be seen."""
    grey, alpha = np.moveaxis(np.asarray(image.convert("LA")), 2, 0)
    return "black" if int(grey[alpha >= _OPAQUE * alpha.max()].min()) > 127 else "white"


def _deep(image: Image.Image) -> Image.Image:
    """Stretches values of more than 8 bits to 0 to 255: their white may be that of 10, 12 or 16 bits, or of 1.0."""
    values = np.asarray(image).astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("a value is not finite")
    low, high = float(values.min()), float(values.max())
    return Image.fromarray((values - low) * (255 / max(high - low, 1e-30)))
