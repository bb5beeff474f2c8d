"""Predictions of segmentation images: for each image, a palette PNG of its classes and a tinted JPEG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from PIL import Image

from lit_mnist.errors import InputError
from segmentation.dataset import SegmentationDataset
from segmentation.images import IGNORED, Pixels
from segmentation.palette import palette_png, tint

MASKS, OVERLAYS = "masks", "overlays"
_JPEG_QUALITY = 90


class WriteMasks(BasePredictionWriter):
    """Writes `masks/NAME.png` and `overlays/NAME.jpg` into the run folder, in the size of each image.

    The pixels of a mask are the classes; a predicted border is 255, as in VOC.
    """

    def __init__(self, write_interval: Literal["batch"] = "batch") -> None:
        super().__init__(write_interval)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Creates the folders."""
        self._folder = Path(trainer.default_root_dir)
        try:
            for name in (MASKS, OVERLAYS):
                (self._folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"{self._folder}: masks cannot be written ({error.strerror or error})") from error

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Writes the files of a batch.

        Raises:
            InputError: An image cannot be read, or a file cannot be written.
        """
        dataset: SegmentationDataset = cast(Any, trainer.predict_dataloaders).dataset
        names = unique_names(dataset.split.images)
        for index, small in zip(prediction["index"].tolist(), prediction["mask"].cpu().numpy(), strict=True):
            image = dataset.split.read(index)
            mask = enlarge(small, image.size)
            if dataset.border_is_class:
                mask = np.where(mask == dataset.num_classes, np.uint8(IGNORED), mask)
            try:
                (self._folder / MASKS / f"{names[index]}.png").write_bytes(palette_png(mask))
                overlay = Image.fromarray(tint(np.asarray(image), mask))
                overlay.save(self._folder / OVERLAYS / f"{names[index]}.jpg", "JPEG", quality=_JPEG_QUALITY)
            except OSError as error:
                raise InputError(f"{self._folder}: a mask cannot be written ({error.strerror or error})") from error


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


def enlarge(mask: Pixels, size: tuple[int, int]) -> Pixels:
    """Resizes a mask to (width, height), with smooth outlines: each pixel gets the class that covers most of it."""
    enlarged, most = np.zeros(size[::-1], np.uint8), np.zeros(size[::-1], np.uint8)
    for number in np.unique(mask):
        area = Image.fromarray(np.where(mask == number, np.uint8(255), np.uint8(0)))
        covered = np.asarray(area.resize(size, Image.Resampling.BILINEAR))
        enlarged[covered > most] = number
        most = np.maximum(most, covered)
    return enlarged
