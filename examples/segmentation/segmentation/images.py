"""Reads and resizes images and their masks. The files may be damaged or hostile.

A mask is an 8-bit PNG, as in Pascal VOC. Its palette indices or gray values are the classes; 255 marks pixels without
a class.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from lit_mnist.errors import InputError
from lit_mnist.plugins.random_numbers import uniform

# The target of pixels that count in no loss and no metric.
IGNORED = 255
# ImageNet's mean and standard deviation of red, green and blue, as shares of 255, which torchvision's weights expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MEAN_COLOR = (round(255 * MEAN[0]), round(255 * MEAN[1]), round(255 * MEAN[2]))
_MIN_SCALE, _MAX_SCALE = 0.5, 2.0
_MAX_PIXELS = 50_000_000
_USER_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")

Pixels = npt.NDArray[np.uint8]


@contextmanager
def open_image(path: Path, formats: tuple[str, ...]) -> Iterator[Image.Image]:
    """Opens an image of limited size. Errors of the decoder inside the block also name the file.

    Args:
        path: The file.
        formats: Pillow's names of the accepted formats; no other decoder sees the file.

    Yields:
        The image, of which only the header has been read.

    Raises:
        InputError: The file cannot be read or decoded, is empty, or has more than 50 megapixels.
    """
    too_large = f"{path}: more than {_MAX_PIXELS // 1_000_000} megapixels; reduce the image first"
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: the file is empty")
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=formats) as image:
                if image.width * image.height > _MAX_PIXELS:
                    raise InputError(too_large)
                yield image
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(too_large) from error
    except UnidentifiedImageError as error:
        raise InputError(f"{path}: not an image in a known format ({', '.join(formats)})") from error
    except Exception as error:  # decoders raise many kinds for a damaged file, SyntaxError among them
        if isinstance(error, OSError) and error.errno:
            raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
        raise InputError(f"{path}: damaged, cannot be decoded ({error})") from error


def read_image(path: Path) -> Image.Image:
    """Reads an image of a data set, a JPEG of any mode and size, as RGB; for errors, see `open_image`."""
    with open_image(path, ("JPEG",)) as image:
        return image.convert("RGB")


def read_user_image(path: Path) -> Image.Image:
    """Reads a user's image as RGB, rotated by its EXIF data, on white if transparent; for errors, see `open_image`."""
    with open_image(path, _USER_FORMATS) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        if image.has_transparency_data:
            colors = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", colors.size, "white"), colors).convert("RGB")
        if image.mode.startswith("I;16"):
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def read_mask(path: Path, num_classes: int, *, border_is_class: bool = False) -> Image.Image:
    """Reads a mask as an image whose gray values are the targets.

    Args:
        path: The PNG file.
        num_classes: Number of classes without the border.
        border_is_class: Whether 255 in the file becomes the last class, instead of `IGNORED`.

    Raises:
        InputError: The file is not a palette or gray PNG that can be decoded, or contains another class.
    """
    with open_image(path, ("PNG",)) as image:
        # Pillow would scale gray values of fewer than 8 bits, and therefore the classes, to 0 to 255.
        with path.open("rb") as file:
            depth, color = file.read(26)[24:]
        if not (color == 3 or (color == 0 and depth == 8)):
            raise InputError(
                f"{path}: not a mask, but a PNG of {image.mode} values with {depth} bits; the pixels of a mask must be "
                "classes: palette indices, or 8-bit gray values"
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
