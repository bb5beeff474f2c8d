"""SegmentationSplit: images in which every pixel has a class, read from files one at a time.

    >>> samples = SegmentationSamples(scenes, size=256, num_classes=21)
    >>> image, target = samples[0]  # uint8 [3, 256, 256], uint8 [256, 256]

A mask is a PNG of 8 bits: a palette's indices, or grey values, which are the classes themselves; 255 marks pixels of no
class. That, and the folders they lie in, is the form of Pascal VOC (`voc.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps

from lit_mnist.data.image_files import open_image
from lit_mnist.errors import InputError

if TYPE_CHECKING:
    from lit_mnist.data.sampler import Indices

# The target of pixels that count in no loss and no metric.
IGNORED = 255
# ImageNet's mean and standard deviation of red, green and blue, as shares of 255, as torchvision's weights expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# What the user's own images may be; a data set's are JPEG.
OWN_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")

Pixels = npt.NDArray[np.uint8]
# Changes a image and its mask of any size, given the sample's number, to those of the size that is asked for.
Change = Callable[[Image.Image, Image.Image, int], tuple[Image.Image, Image.Image]]


@dataclass(frozen=True, eq=False)
class SegmentationSplit:
    """One half of a data set of scenes, as files.

    Args:
        images: The images' files.
        masks: Their masks' files; none at all for the user's own images, of which nothing is known.
    """

    images: tuple[Path, ...]
    masks: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Indices) -> SegmentationSplit:
        """Returns some samples, in this order."""
        chosen = indices.tolist()
        masks = tuple(self.masks[index] for index in chosen) if self.masks else ()
        return SegmentationSplit(tuple(self.images[index] for index in chosen), masks)


def read_image(path: Path) -> Image.Image:
    """Returns a data set's image in RGB, of whatever JPEG: grey, CMYK, any size, as stored.

    Raises:
        InputError: The file is no JPEG that can be decoded; see `open_image`.
    """
    with open_image(path, ("JPEG",)) as image:
        return image.convert("RGB")


def read_user_image(path: Path) -> Image.Image:
    """Returns a user's image in RGB as a viewer shows it: turned as its EXIF data say, on white where transparent.

    Raises:
        InputError: The file is no image that can be decoded; see `open_image`.
    """
    with open_image(path, OWN_FORMATS) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if image.has_transparency_data:
            own = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", own.size, "white"), own).convert("RGB")
        if image.mode.startswith("I;16"):
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def read_mask(path: Path, num_classes: int, *, border_is_class: bool = False) -> Image.Image:
    """Returns a mask as a image of grey values, which are the targets.

    Args:
        path: The PNG file.
        num_classes: Number of classes, the border's one included where it is one.
        border_is_class: Whether 255 in the file becomes the last class, and not `IGNORED`.

    Raises:
        InputError: The file is no palette or grey PNG that can be decoded, or holds another class.
    """
    with open_image(path, ("PNG",)) as image:
        # Fewer than 8 bits of grey would be stretched to 0 to 255, and the classes with them.
        with path.open("rb") as file:
            depth, colour = file.read(26)[24:]
        if not (colour == 3 or (colour == 0 and depth == 8)):
            raise InputError(
                f"{path}: no mask, but a PNG of {image.mode} values with {depth} bits; a mask's pixels are classes: a "
                "palette's indices, or grey values of 8 bits"
            )
        image.load()
        values = np.asarray(image)
    known = num_classes - border_is_class
    counts = np.bincount(values.ravel(), minlength=256)
    wrong = np.flatnonzero(counts[known:IGNORED]) + known
    if len(wrong):
        raise InputError(
            f"{path}: {counts[wrong[0]]} pixels are of class {wrong[0]}, but the classes are 0 to {known - 1}, and "
            f"{IGNORED} for a border"
        )
    if border_is_class:
        values = np.where(values == IGNORED, np.uint8(known), values)
    return Image.fromarray(values)


class SegmentationSamples(torch.utils.data.Dataset[tuple[torch.Tensor, Pixels] | InputError]):
    """The samples of a split of scenes, each read and brought to one size when it is asked for.

    They stay bytes, which a loader's worker hands over more cheaply; `normalised` makes them what a network sees.

    Args:
        scenes: The samples.
        size: Height and width of what is returned.
        num_classes: Number of classes.
        border_is_class: Whether 255 in a mask becomes the last class.
        change: What makes a image and its mask of that size; unset: the whole image is resized.
    """

    def __init__(
        self,
        scenes: SegmentationSplit,
        *,
        size: int,
        num_classes: int,
        border_is_class: bool = False,
        change: Change | None = None,
    ) -> None:
        self.segmentation = scenes
        self.size = size
        self.num_classes = num_classes
        self.border_is_class = border_is_class
        self.change = change

    def __len__(self) -> int:
        return len(self.segmentation)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Pixels] | InputError:
        """Returns a image, uint8 [3, size, size], and its targets, uint8 [size, size].

        A file that cannot be read any more comes back as the error itself: raised in a worker, it would reach the
        user within that process's traceback.
        """
        try:
            image, mask = self._read(index)
        except InputError as error:
            return error
        if self.change:
            image, mask = self.change(image, mask, index)
        else:
            image, mask = resized(image, mask, self.size)
        return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))), np.asarray(mask)

    def _read(self, index: int) -> tuple[Image.Image, Image.Image]:
        if not self.segmentation.masks:
            image = read_user_image(self.segmentation.images[index])
            return image, Image.new("L", image.size, IGNORED)
        image = read_image(self.segmentation.images[index])
        mask = read_mask(self.segmentation.masks[index], self.num_classes, border_is_class=self.border_is_class)
        return image, mask


def resized(image: Image.Image, mask: Image.Image, size: int) -> tuple[Image.Image, Image.Image]:
    """Returns a image (bilinear, smoothed where it shrinks) and its mask (nearest) of `size` x `size` pixels."""
    return (
        image.resize((size, size), Image.Resampling.BILINEAR),
        mask.resize((size, size), Image.Resampling.NEAREST),
    )


def normalised(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns images, uint8 [batch, 3, height, width], as a network sees them, in a floating-point type."""
    mean, std = (torch.tensor(values, dtype=dtype).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
    return images.to(dtype).sub_(mean).div_(std)
