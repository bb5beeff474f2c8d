"""Images in which every pixel has a class, read from files one at a time.

    >>> samples = SegmentationSamples(split, DataSettings(name="voc2012"))
    >>> image, target = samples[0]  # uint8 [3, 256, 256], uint8 [256, 256]

A mask is a PNG of 8 bits. Its palette indices or grey values are the classes; 255 marks pixels without a class. This
format, and that of the folders, is that of Pascal VOC (`voc.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps

from lit_mnist.data.classes import class_names
from lit_mnist.data.image_files import USER_FORMATS, open_image
from lit_mnist.data.sampler import Indices
from lit_mnist.data.segmentation.augmentation import IGNORED, MEAN, STD, random_crop, resize
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class SegmentationSplit:
    """The training or the test part of a data set of segmentation images, as files.

    Args:
        images: The files of the images.
        masks: The files of their masks; empty for a user's images, which have none.
    """

    images: tuple[Path, ...]
    masks: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Indices) -> SegmentationSplit:
        """Returns some samples, in this order."""
        images, masks = (tuple(files[index] for index in indices if files) for files in (self.images, self.masks))
        return SegmentationSplit(images, masks)

    def read(self, index: int) -> Image.Image:
        """Returns the image of a sample in RGB, in its own size.

        Raises:
            InputError: The file cannot be decoded; see `open_image`.
        """
        return read_image(self.images[index]) if self.masks else read_user_image(self.images[index])

    def shown(self, index: int, settings: DataSettings) -> tuple[str, Pixels, Pixels]:
        """Returns a sample for display: a name, the image uint8 [size, size, 3], and its mask uint8 [size, size]."""
        image, mask = SegmentationSamples(self, settings).read(index)
        return self.images[index].stem, np.asarray(image), np.asarray(mask)

    def samples(
        self, settings: DataSettings, dtype: torch.dtype, draws: tuple[int, int] | None = None
    ) -> SegmentationSamples:
        """Returns the samples for a DataLoader; see `SegmentationSamples`."""
        return SegmentationSamples(self, settings, dtype, draws)


def read_image(path: Path) -> Image.Image:
    """Returns the image of a data set in RGB, from any JPEG: grey, CMYK, of any size.

    Raises:
        InputError: The file is not a JPEG that can be decoded; see `open_image`.
    """
    with open_image(path, ("JPEG",)) as image:
        return image.convert("RGB")


def read_user_image(path: Path) -> Image.Image:
    """Returns a user's image in RGB as a viewer shows it: turned as its EXIF data say, on white if transparent.

    Raises:
        InputError: The file is not an image that can be decoded; see `open_image`.
    """
    with open_image(path, USER_FORMATS) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if image.has_transparency_data:
            colors = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", colors.size, "white"), colors).convert("RGB")
        if image.mode.startswith("I;16"):
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def read_mask(path: Path, num_classes: int, *, border_is_class: bool = False) -> Image.Image:
    """Returns a mask as an image of grey values, which are the targets.

    Args:
        path: The PNG file.
        num_classes: Number of classes without the border.
        border_is_class: Whether 255 in the file becomes the last class, instead of `IGNORED`.

    Raises:
        InputError: The file is not a palette or grey PNG that can be decoded, or contains another class.
    """
    with open_image(path, ("PNG",)) as image:
        # Pillow would stretch grey values of fewer than 8 bits to 0 to 255, and the classes with them.
        with path.open("rb") as file:
            depth, colour = file.read(26)[24:]
        if not (colour == 3 or (colour == 0 and depth == 8)):
            raise InputError(
                f"{path}: not a mask, but a PNG of {image.mode} values with {depth} bits; the pixels of a mask are "
                "classes: indices of a palette, or grey values of 8 bits"
            )
        image.load()
        values = np.asarray(image)
    counts = np.bincount(values.ravel(), minlength=256)
    wrong = np.flatnonzero(counts[num_classes:IGNORED]) + num_classes
    if len(wrong):
        raise InputError(
            f"{path}: {counts[wrong[0]]} pixels are of class {wrong[0]}, but the classes are 0 to {num_classes - 1}, "
            f"and {IGNORED} for a border"
        )
    if border_is_class:
        values = np.where(values == IGNORED, np.uint8(num_classes), values)
    return Image.fromarray(values)


class SegmentationSamples(torch.utils.data.Dataset[tuple[torch.Tensor, Pixels] | InputError]):
    """The samples of a split, each read from its files and brought to one size.

    They stay bytes, which a loader worker hands over with less work than floats; see `batch`.

    Args:
        split: The samples.
        settings: The data set, the size of the images, and the augmentation.
        dtype: Floating-point type of the images of a batch.
        draws: Seed and epoch of the augmentation; by default, the whole image is resized.
    """

    def __init__(
        self,
        split: SegmentationSplit,
        settings: DataSettings,
        dtype: torch.dtype = torch.float32,
        draws: tuple[int, int] | None = None,
    ) -> None:
        self.split = split
        self.settings = settings
        self.dtype = dtype
        self.draws = draws if settings.augment == "crop" else None
        self.border_is_class = settings.border == "class"
        self.num_classes = len(class_names(settings)) - self.border_is_class

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Pixels] | InputError:
        """Returns an image, uint8 [3, size, size], and its targets, uint8 [size, size].

        The error of a file that cannot be read is returned: raised in a worker, it would reach the user as part of the
        traceback of that process.
        """
        try:
            image, mask = self.read(index)
        except InputError as error:
            return error
        return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))), np.asarray(mask)

    def read(self, index: int) -> tuple[Image.Image, Image.Image]:
        """Returns an image and its mask in the size that the network sees.

        Raises:
            InputError: A file cannot be read or decoded.
        """
        image, size = self.split.read(index), self.settings.image_size
        if self.split.masks:
            mask = read_mask(self.split.masks[index], self.num_classes, border_is_class=self.border_is_class)
        else:
            mask = Image.new("L", image.size, IGNORED)
        if self.draws is None:
            return resize(image, mask, size)
        seed, epoch = self.draws
        return random_crop(image, mask, index, size=size, seed=seed, epoch=epoch)

    def batch(self, images: torch.Tensor, masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Converts stacked samples to the images and targets of a batch.

        Returns:
            Normalized images, float [batch, 3, size, size], and classes, int64 [batch, size, size].
        """
        mean, std = (torch.tensor(values, dtype=self.dtype).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
        return images.to(self.dtype).sub_(mean).div_(std), masks.long()
