"""Predictions of scenes: for each image a palette PNG of its classes and the image tinted with them."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.data.dataset import IGNORED, Dataset, class_names
from lit_mnist.data.segmentation.images import SegmentationSplit, read_image, read_user_image
from lit_mnist.data.segmentation.palette import palette_png, tinted
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings
from lit_mnist.predict.images import read_all

MASKS, OVERLAYS = "masks", "overlays"
_JPEG_QUALITY = 90

Pixels = npt.NDArray[np.uint8]


class PredictedMask(NamedTuple):
    """What the table tells of a image.

    Attributes:
        sample: The image's number in the split.
        probability: The mean over its pixels of the predicted class's probability.
        width: The image's width in pixels.
        height: Its height.
        shares: The share of each class, from 0 to 1, of its pixels.
    """

    sample: int
    probability: float
    width: int
    height: int
    shares: list[float]


def user_images(files: Sequence[Path], settings: DataSettings) -> Dataset:
    """Returns the user's images as the test split of a data set of which nothing else is needed.

    Raises:
        InputError: Files cannot be decoded; see `open_image`. The message names them all.
    """
    read_all(files, lambda path: read_user_image(path).size)
    nothing = SegmentationSplit((), ())
    names = class_names(settings.name, border=settings.border)
    return Dataset(settings.name, "images of the user's", "", names, nothing, SegmentationSplit(tuple(files), ()))


def names_of(files: Sequence[Path]) -> list[str]:
    """Returns a name for what is written of each image: its file's, with its number where several have the same."""
    often = Counter(path.stem for path in files)
    taken = {stem for stem, count in often.items() if count == 1}
    names = []
    for number, path in enumerate(files):
        name = path.stem
        while often[path.stem] > 1 and name in taken | {path.stem}:
            name = f"{name}-{number}"
        taken.add(name)
        names.append(name)
    return names


def write_masks(
    folder: Path,
    scenes: SegmentationSplit,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    settings: DataSettings,
) -> list[PredictedMask]:
    """Writes `masks/NAME.png` and `overlays/NAME.jpg` of the images that this rank has predicted.

    Both have the image's own size. A predicted border is 255 in the mask, as in VOC's.

    Args:
        folder: The run folder.
        scenes: All images of the split.
        batches: Indices, int64 [batch]; predicted classes, uint8 [batch, height, width]; and their mean probabilities,
            float [batch].
        settings: Which classes there are.

    Raises:
        InputError: A image cannot be read any more, or a file cannot be written.
    """
    classes = len(class_names(settings.name, border=settings.border))
    names = names_of(scenes.images)
    rows = []
    try:
        for place in (MASKS, OVERLAYS):
            (folder / place).mkdir(exist_ok=True)
        for indices, predicted, probabilities in batches:
            for index, small, probability in zip(
                indices.tolist(), predicted.cpu().numpy(), probabilities.tolist(), strict=True
            ):
                read = read_image if scenes.masks else read_user_image
                image = read(scenes.images[index])
                mask = _enlarged(small, image.size)
                shares = np.bincount(mask.ravel(), minlength=classes) / mask.size
                rows.append(PredictedMask(index, probability, *image.size, shares.tolist()))
                if settings.border == "class":
                    mask = np.where(mask == classes - 1, np.uint8(IGNORED), mask)
                _write(folder / MASKS / f"{names[index]}.png", palette_png(mask))
                _write(folder / OVERLAYS / f"{names[index]}.jpg", _jpeg(tinted(np.asarray(image), mask)))
    except OSError as error:
        raise InputError(f"{folder}: a mask cannot be written ({error.strerror or error})") from error
    return rows


def write_mask_table(path: Path, rows: Sequence[PredictedMask], files: Sequence[Path], classes: Sequence[str]) -> None:
    """Writes `index,file,mask,width,height,probability` and the share of each class, one row per image.

    Args:
        path: The CSV file; its folder must exist.
        rows: What was predicted, in the images' order.
        files: The images.
        classes: The classes' names.

    Raises:
        InputError: The file cannot be written.
    """
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["index", "file", "mask", "width", "height", "probability", *classes])
    for row, file, name in zip(rows, files, names_of(files), strict=True):
        shares = [f"{share:.6f}" for share in row.shares]
        mask = f"{MASKS}/{name}.png"
        table.writerow([row.sample, file, mask, row.width, row.height, f"{row.probability:.6f}", *shares])
    try:
        # A file's name that is not UTF-8 reaches Python as lone surrogates and goes back to its own bytes.
        _write(path, text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise InputError(f"{path}: the table cannot be written ({error.strerror or error})") from error


def _enlarged(mask: Pixels, size: tuple[int, int]) -> Pixels:
    """Returns a mask in another size, (width, height): of each pixel the class that covers the most of it.

    Each class's area is resized as a image is, which leaves smooth outlines, where the nearest pixel's class would
    leave steps.
    """
    enlarged, most = np.zeros(size[::-1], np.uint8), np.zeros(size[::-1], np.uint8)
    for number in np.unique(mask):
        area = Image.fromarray(np.where(mask == number, np.uint8(255), np.uint8(0)))
        covered = np.asarray(area.resize(size, Image.Resampling.BILINEAR))
        enlarged[covered > most] = number
        most = np.maximum(most, covered)
    return enlarged


def _jpeg(image: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue()


def _write(path: Path, content: bytes) -> None:
    with atomic_file(path) as file:
        file.write(content)
