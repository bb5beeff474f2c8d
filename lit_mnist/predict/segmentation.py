"""Predictions of segmentation images: for each image, a palette PNG of its classes and a tinted JPEG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.data.classes import class_names
from lit_mnist.data.dataset import IGNORED, Dataset, SegmentationSplit
from lit_mnist.data.segmentation.palette import palette_png, tint
from lit_mnist.data.segmentation.split import read_user_image
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings
from lit_mnist.predict.table import write_csv
from lit_mnist.predict.user_images import read_all
from lit_mnist.training.evaluation import Prediction
from lit_mnist.training.job import ExperimentJob

TABLE, MASKS, OVERLAYS = "predictions.csv", "masks", "overlays"
_JPEG_QUALITY = 90

Pixels = npt.NDArray[np.uint8]


def load_user_images(files: Sequence[Path], settings: DataSettings, *, fetch: bool = False) -> Dataset:
    """Returns a data set with only a user's images, as the test split; the files of `settings` are not read.

    Raises:
        InputError: Images cannot be decoded; the message names them all.
    """
    read_all(files, lambda path: read_user_image(path).size)
    empty, user = SegmentationSplit((), ()), SegmentationSplit(tuple(files), ())
    return Dataset(settings.name, "images of the user", "", class_names(settings), empty, user)


def collect_rows(job: ExperimentJob, batches: Iterable[Prediction]) -> list[list[Any]]:
    """Writes the masks and overlays of this rank; see `write_masks`."""
    split = job.splits.test
    assert isinstance(split, SegmentationSplit)
    return write_masks(job.folder, split, batches, job.experiment.data)


def write(job: ExperimentJob, rows: Sequence[Sequence[Any]]) -> Sequence[str]:
    """Writes `index,file,mask,width,height,probability` and the share of each class, one row per image.

    Raises:
        InputError: The file cannot be written.
    """
    split = job.splits.test
    assert isinstance(split, SegmentationSplit)
    table = []
    for (index, probability, width, height, *shares), file, name in zip(
        rows, split.images, unique_names(split.images), strict=True
    ):
        row = [index, file, f"{MASKS}/{name}.png", width, height, f"{probability:.6f}"]
        table.append([*row, *(f"{share:.6f}" for share in shares)])
    header = ["index", "file", "mask", "width", "height", "probability", *job.dataset.class_names]
    write_csv(job.folder / TABLE, header, table)
    return TABLE, MASKS, OVERLAYS


def unique_names(files: Sequence[Path]) -> list[str]:
    """Returns the stem of each file for its output, with the index appended if several files have the same stem."""
    counts = Counter(path.stem for path in files)
    taken = {stem for stem, count in counts.items() if count == 1}
    names = []
    for index, path in enumerate(files):
        name = path.stem
        while counts[path.stem] > 1 and name in taken | {path.stem}:
            name = f"{name}-{index}"
        taken.add(name)
        names.append(name)
    return names


def write_masks(
    folder: Path, split: SegmentationSplit, batches: Iterable[Prediction], settings: DataSettings
) -> list[list[Any]]:
    """Writes `masks/NAME.png` and `overlays/NAME.jpg` of the predictions of this rank, in the size of the images.

    A predicted border is 255 in the mask, as in VOC. A batch has masks, uint8 [batch, height, width], and the mean
    probability over the pixels of each image.

    Returns:
        For each image, its index, probability, width, height, and the share of its pixels in each class.

    Raises:
        InputError: An image cannot be read, or a file cannot be written.
    """
    classes, names = len(class_names(settings)), unique_names(split.images)
    rows: list[list[Any]] = []
    try:
        for name in (MASKS, OVERLAYS):
            (folder / name).mkdir(exist_ok=True)
        for indices, predicted, probabilities in batches:
            for index, small, probability in zip(
                indices.tolist(), predicted.cpu().numpy(), probabilities.tolist(), strict=True
            ):
                image = split.read(index)
                mask = _enlarge(small, image.size)
                shares = np.bincount(mask.ravel(), minlength=classes) / mask.size
                rows.append([index, probability, *image.size, *shares.tolist()])
                if settings.border == "class":
                    mask = np.where(mask == classes - 1, np.uint8(IGNORED), mask)
                with atomic_file(folder / MASKS / f"{names[index]}.png") as file:
                    file.write(palette_png(mask))
                with atomic_file(folder / OVERLAYS / f"{names[index]}.jpg") as file:
                    Image.fromarray(tint(np.asarray(image), mask)).save(file, "JPEG", quality=_JPEG_QUALITY)
    except OSError as error:
        raise InputError(f"{folder}: a mask cannot be written ({error.strerror or error})") from error
    return rows


def _enlarge(mask: Pixels, size: tuple[int, int]) -> Pixels:
    """Resizes a mask to (width, height), with smooth outlines: each pixel gets the class that covers most of it."""
    enlarged, most = np.zeros(size[::-1], np.uint8), np.zeros(size[::-1], np.uint8)
    for number in np.unique(mask):
        area = Image.fromarray(np.where(mask == number, np.uint8(255), np.uint8(0)))
        covered = np.asarray(area.resize(size, Image.Resampling.BILINEAR))
        enlarged[covered > most] = number
        most = np.maximum(most, covered)
    return enlarged
