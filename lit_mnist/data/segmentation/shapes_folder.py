"""The data set `shapes` as files: generated once per machine in the folders of Pascal VOC, and read by `voc.py`."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from lit_mnist.data.download import check_allowed, partial_folder, user_cache, writing
from lit_mnist.data.segmentation.palette import palette_png
from lit_mnist.data.segmentation.shapes import make_image
from lit_mnist.data.segmentation.voc import IMAGES, LISTS, MASKS, Loaded, folder_sha256, load_folder
from lit_mnist.errors import InputError

# The number is to be increased with every change of a byte, so that existing folders stay as they are.
NAME = "shapes-1"
TRAIN, TEST, SIDE = 2000, 500, 96
_SEED = 2012
_JPEG_QUALITY = 92
# The file with the digest of the generated files.
_DIGEST = "sha256.txt"


def load_shapes(root: Path | None, num_classes: int, *, make: bool = True) -> Loaded:
    """Loads the shapes, and generates them if they are missing.

    Args:
        root: The folder that contains `shapes-1`; by default the user's cache.
        num_classes: Number of classes without the border.
        make: Whether missing shapes may be generated.

    Returns:
        See `voc.load_folder`.

    Raises:
        InputError: The folder cannot be written, or a file in it is damaged.
    """
    root = root or user_cache()
    folder = root / NAME
    if not folder.is_dir():
        check_allowed("shapes", root, allowed=make)
        with writing(root, "generate the shapes in"):
            if not folder.is_dir():
                # They get their name when all of them are there.
                with partial_folder(root / f".{NAME}.partial") as partial:
                    write_shapes(partial, train=TRAIN, test=TEST, side=SIDE)
                    (partial / _DIGEST).write_text(folder_sha256(partial))
                    partial.replace(folder)
    advice = f"Delete {folder} to have the shapes generated again."
    try:
        loaded = load_folder(folder, num_classes)
        digest = (folder / _DIGEST).read_text()
    except InputError as error:
        raise InputError(f"{error}. {advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / _DIGEST} cannot be read ({error}). {advice}") from error
    if loaded[1] != digest:
        raise InputError(f"{folder}: these are not the generated shapes, but other files. {advice}")
    return loaded


def write_shapes(folder: Path, *, train: int, test: int, side: int, seed: int = _SEED) -> None:
    """Writes images of shapes in the folders of Pascal VOC.

    Args:
        folder: The folder that gets `ImageSets`, `JPEGImages` and `SegmentationClass`.
        train: Number of training images.
        test: Number of test images, which `val.txt` lists.
        side: Height and width of each in pixels.
        seed: Seed of the set.

    Raises:
        OSError: A file cannot be written.
    """
    for place in (LISTS, IMAGES, MASKS):
        (folder / place).mkdir(parents=True)
    names = [f"{number:06}" for number in range(train + test)]
    for number, name in enumerate(names):
        image, mask = make_image(seed=seed, number=number, side=side)
        (folder / IMAGES / f"{name}.jpg").write_bytes(_jpeg(image))
        (folder / MASKS / f"{name}.png").write_bytes(palette_png(mask))
    for split, chosen in (("train", names[:train]), ("val", names[train:])):
        (folder / LISTS / f"{split}.txt").write_text("".join(f"{name}\n" for name in chosen), encoding="utf-8")


def _jpeg(image: npt.NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    # Every setting is stated that another release of the encoder could choose differently.
    Image.fromarray(image).save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling=0, optimize=False)
    return buffer.getvalue()
