"""Augmentation of a segmentation image: random scale, position and flip, each a function of (seed, epoch, sample)."""

from __future__ import annotations

from PIL import Image, ImageOps

from lit_mnist.data.rng import uniform

# The target of pixels that count in no loss and no metric.
IGNORED = 255
# ImageNet's mean and standard deviation of red, green and blue, as shares of 255, which torchvision's weights expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_MIN_SCALE, _MAX_SCALE = 0.5, 2.0
_MEAN_COLOR = (round(255 * MEAN[0]), round(255 * MEAN[1]), round(255 * MEAN[2]))


def resize(image: Image.Image, mask: Image.Image, size: int) -> tuple[Image.Image, Image.Image]:
    """Returns an image (bilinear, antialiased) and its mask (nearest) in `size` x `size` pixels."""
    return (
        image.resize((size, size), Image.Resampling.BILINEAR),
        mask.resize((size, size), Image.Resampling.NEAREST),
    )


def random_crop(
    image: Image.Image, mask: Image.Image, index: int, *, size: int, seed: int, epoch: int
) -> tuple[Image.Image, Image.Image]:
    """Returns a random part of an image, or the image within a margin.

    The image in its evaluation size, `size` x `size`, is scaled by 0.5 to 2, mirrored with probability 1/2, and cropped
    to `size` x `size` at a random position (Chen et al.: Rethinking Atrous Convolution for Semantic Image Segmentation,
    2017). A smaller image gets a margin, which is ignored.

    Args:
        image: RGB, of any size.
        mask: Its classes as grey values, of the same size.
        index: Index of the sample in the training set.
        size: Height and width of the result in pixels.
        seed: The seed of the experiment.
        epoch: The epoch, from 0.
    """
    # The names of these numbers are part of the results.
    scale, across, down, mirrored = (
        float(uniform(seed, f"scene {purpose}", epoch, index)) for purpose in ("scale", "across", "down", "mirrored")
    )
    side = max(1, round(size * (_MIN_SCALE + (_MAX_SCALE - _MIN_SCALE) * scale)))
    image, mask = resize(image, mask, side)
    if mirrored < 0.5:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    # The corner of the crop in the image, or the corner of the image in the margin.
    left, top = (int(place * (abs(side - size) + 1)) for place in (across, down))
    if side >= size:
        box = (left, top, left + size, top + size)
        return image.crop(box), mask.crop(box)
    page, targets = Image.new("RGB", (size, size), _MEAN_COLOR), Image.new("L", (size, size), IGNORED)
    page.paste(image, (left, top))
    targets.paste(mask, (left, top))
    return page, targets
