"""The data set `shapes` as files: made once per machine, in the folders of Pascal VOC, and read by the code for VOC."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from lit_mnist.data.digits.family import user_cache
from lit_mnist.data.digits.fetch import check_allowed, exclusive
from lit_mnist.data.segmentation.images import SegmentationSplit
from lit_mnist.data.segmentation.palette import palette_png
from lit_mnist.data.segmentation.shapes import make_image
from lit_mnist.data.segmentation.voc import LISTS, MASKS, PICTURES, content_sha256, load_split
from lit_mnist.errors import InputError

# The number is to be raised with whatever changes a byte: an older folder then stays as it is.
NAME = "shapes-1"
TRAIN, TEST, SIDE = 2000, 500, 96
_SEED = 2012
_JPEG_QUALITY = 92
# The file that tells the digest of what was made.
_DIGEST = "sha256.txt"


def load_shapes(
    root: Path | None, num_classes: int, *, make: bool = True
) -> tuple[str, str, SegmentationSplit, SegmentationSplit]:
    """Loads the shapes, and makes them where they are missing.

    Args:
        root: The folder that gets `shapes-1`; without one the user's cache.
        num_classes: Number of classes, the border not counted.
        make: Whether they are made where they are missing.

    Returns:
        As of `voc.load_split`.

    Raises:
        InputError: The folder cannot be written, or a file in it is damaged.
    """
    root = root or user_cache()
    folder = root / NAME
    try:
        if not folder.is_dir():
            check_allowed("shapes", root, allowed=make)
            root.mkdir(parents=True, exist_ok=True)
            with exclusive(root, "make the shapes in"):
                if not folder.is_dir():
                    _make(root, folder)
    except OSError as error:
        raise InputError(
            f"The shapes cannot be kept in {root}: {error}. Name a folder that can be written to with data.root."
        ) from error
    advice = f"Delete {folder} to have the shapes made again."
    try:
        source, sha256, train, test = load_split(folder, num_classes)
        made = (folder / _DIGEST).read_text()
    except InputError as error:
        raise InputError(f"{error}. {advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / _DIGEST} cannot be read ({error}). {advice}") from error
    if sha256 != made:
        raise InputError(f"{folder}: these are not the shapes that were made here, but other files. {advice}")
    return source, sha256, train, test


def _make(root: Path, folder: Path) -> None:
    """Makes all scenes in a folder of their own, which gets its name when all are there."""
    partial = root / f".{NAME}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    # Here, since what is made below it would follow a symbolic link of another user's.
    partial.mkdir()
    try:
        write_shapes(partial, train=TRAIN, test=TEST, side=SIDE)
        (partial / _DIGEST).write_text(content_sha256(partial))
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_shapes(folder: Path, *, train: int, test: int, side: int, seed: int = _SEED) -> None:
    """Writes images of shapes in the folders of Pascal VOC.

    Args:
        folder: The folder that gets `ImageSets`, `JPEGImages` and `SegmentationClass`.
        train: Number of scenes for training.
        test: Number of scenes for test, which `val.txt` lists.
        side: Height and width of each in pixels.
        seed: Which set of scenes.

    Raises:
        OSError: A file cannot be written.
    """
    for place in (LISTS, PICTURES, MASKS):
        (folder / place).mkdir(parents=True)
    names = [f"{number:06}" for number in range(train + test)]
    for number, name in enumerate(names):
        image, mask = make_image(seed=seed, number=number, side=side)
        (folder / PICTURES / f"{name}.jpg").write_bytes(_jpeg(image))
        (folder / MASKS / f"{name}.png").write_bytes(palette_png(mask))
    for split, chosen in (("train", names[:train]), ("val", names[train:])):
        (folder / LISTS / f"{split}.txt").write_text("".join(f"{name}\n" for name in chosen), encoding="utf-8")


def _jpeg(image: npt.NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    # Every setting that a release of the encoder could choose otherwise is named.
    Image.fromarray(image).save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling=0, optimize=False)
    return buffer.getvalue()
