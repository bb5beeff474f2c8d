"""Images in which every pixel has a class, read from files one at a time.

A mask is an 8-bit PNG, as in Pascal VOC. Its palette indices or grey values are the classes; 255 marks pixels without
a class. The augmentation (random scale, position and flip) is a function of (seed, epoch, sample).
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
from lit_mnist.distributed.rng import uniform
from lit_mnist.distributed.sample_order import Indices
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings

# The target of pixels that count in no loss and no metric.
IGNORED = 255
# ImageNet's mean and standard deviation of red, green and blue, as shares of 255, which torchvision's weights expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MEAN_COLOR = (round(255 * MEAN[0]), round(255 * MEAN[1]), round(255 * MEAN[2]))
_MIN_SCALE, _MAX_SCALE = 0.5, 2.0

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class SegmentationSplit:
    """A split of a data set of segmentation images, as files.

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
        """Returns the image of a sample in RGB and in its own size; raises InputError if it cannot be decoded."""
        return read_image(self.images[index]) if self.masks else read_user_image(self.images[index])

    def display_sample(self, index: int, settings: DataSettings) -> tuple[str, Pixels, Pixels]:
        """Returns a sample for display: a name, the image, uint8 [size, size, 3], and its mask, uint8 [size, size]."""
        image, mask = SegmentationSamples(self, settings).read(index)
        return self.images[index].stem, np.asarray(image), np.asarray(mask)

    def samples(
        self, settings: DataSettings, dtype: torch.dtype, draws: tuple[int, int] | None = None
    ) -> SegmentationSamples:
        """Returns the samples for a DataLoader; see `SegmentationSamples`."""
        return SegmentationSamples(self, settings, dtype, draws)


def read_image(path: Path) -> Image.Image:
    """Reads an image of a data set, a JPEG of any mode and size, as RGB; for errors, see `open_image`."""
    with open_image(path, ("JPEG",)) as image:
        return image.convert("RGB")


def read_user_image(path: Path) -> Image.Image:
    """Reads a user's image as RGB, rotated by its EXIF data, on white if transparent; for errors, see `open_image`."""
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
    """Reads a mask as an image whose grey values are the targets.

    Args:
        path: The PNG file.
        num_classes: Number of classes without the border.
        border_is_class: Whether 255 in the file becomes the last class, instead of `IGNORED`.

    Raises:
        InputError: The file is not a palette or grey PNG that can be decoded, or contains another class.
    """
    with open_image(path, ("PNG",)) as image:
        # Pillow would scale grey values of fewer than 8 bits, and therefore the classes, to 0 to 255.
        with path.open("rb") as file:
            depth, colour = file.read(26)[24:]
        if not (colour == 3 or (colour == 0 and depth == 8)):
            raise InputError(
                f"{path}: not a mask, but a PNG of {image.mode} values with {depth} bits; the pixels of a mask must be "
                "classes: palette indices, or 8-bit grey values"
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


def resize(image: Image.Image, mask: Image.Image, size: int) -> tuple[Image.Image, Image.Image]:
    """Resizes an image (bilinear, antialiased) and its mask (nearest) to `size` x `size` pixels."""
    return (
        image.resize((size, size), Image.Resampling.BILINEAR),
        mask.resize((size, size), Image.Resampling.NEAREST),
    )


def random_crop(
    image: Image.Image, mask: Image.Image, index: int, *, size: int, seed: int, epoch: int
) -> tuple[Image.Image, Image.Image]:
    """Crops an image and its mask at random to `size` x `size` pixels.

    The image is resized to `size` x `size`, scaled by 0.5 to 2, mirrored with probability 1/2, and cropped at a random
    position (Chen et al.: Rethinking Atrous Convolution for Semantic Image Segmentation, 2017). A smaller image gets a
    margin, which is ignored. `index` is that of the sample in the training set.
    """
    # These purposes determine the random numbers: renaming one would change the results.
    scale, across, down, mirrored = (
        float(uniform(seed, f"scene {purpose}", epoch, index)) for purpose in ("scale", "across", "down", "mirrored")
    )
    side = max(1, round(size * (_MIN_SCALE + (_MAX_SCALE - _MIN_SCALE) * scale)))
    image, mask = resize(image, mask, side)
    if mirrored < 0.5:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    # The corner of the crop in the image, or of the image in the page.
    left, top = (int(share * (abs(side - size) + 1)) for share in (across, down))
    if side >= size:
        box = (left, top, left + size, top + size)
        return image.crop(box), mask.crop(box)
    page, targets = Image.new("RGB", (size, size), _MEAN_COLOR), Image.new("L", (size, size), IGNORED)
    page.paste(image, (left, top))
    targets.paste(mask, (left, top))
    return page, targets


class SegmentationSamples(torch.utils.data.Dataset[tuple[torch.Tensor, Pixels] | InputError]):
    """The samples of a split for a DataLoader, each read from its files and resized.

    A loader worker transfers bytes, which are smaller than floats; `batch` converts them to images of type `dtype`.
    `draws` is the seed and the epoch of the augmentation; by default, the whole image is resized.
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

        Returns the error of a file that cannot be read: raised in a worker, it would be buried in a traceback.
        """
        try:
            image, mask = self.read(index)
        except InputError as error:
            return error
        return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))), np.asarray(mask)

    def read(self, index: int) -> tuple[Image.Image, Image.Image]:
        """Returns an image and its mask in the size of the network's input; raises InputError if this fails."""
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
        """Normalizes stacked images, float [batch, 3, size, size], and returns classes, int64 [batch, size, size]."""
        mean, std = (torch.tensor(values, dtype=self.dtype).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
        return images.to(self.dtype).sub_(mean).div_(std), masks.long()
