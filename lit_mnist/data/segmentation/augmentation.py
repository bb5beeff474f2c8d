"""Augmentation of a scene: random scale, place and flip, each a function of (seed, epoch, sample)."""

from __future__ import annotations

from PIL import Image, ImageOps

from lit_mnist.data.rng import uniform
from lit_mnist.data.segmentation.images import IGNORED, MEAN, resized

LEAST_SCALE, MOST_SCALE = 0.5, 2.0
_MEAN_COLOUR = (round(255 * MEAN[0]), round(255 * MEAN[1]), round(255 * MEAN[2]))


def random_crop(
    image: Image.Image, mask: Image.Image, index: int, *, size: int, seed: int, epoch: int
) -> tuple[Image.Image, Image.Image]:
    """Returns a random part of a scene, or the scene within a margin.

    What evaluation sees, the whole image brought to `size` x `size`, is scaled by 0.5 to 2, mirrored or not, and a
    square of `size` is cut from it at a random place, as DeepLab's authors do (Chen et al.: Rethinking Atrous
    Convolution for Semantic Image Segmentation, 2017). A smaller one gets a margin, which is ignored.

    Args:
        image: RGB, of any size.
        mask: Its classes as grey values, of the same size.
        index: The sample's number in the training set.
        size: Height and width of what is returned, in pixels.
        seed: The experiment's seed.
        epoch: The epoch, from 0.
    """
    scale, across, down, mirrored = (
        float(uniform(seed, purpose, epoch, index))
        for purpose in ("scene scale", "scene across", "scene down", "scene mirrored")
    )
    side = max(1, round(size * (LEAST_SCALE + (MOST_SCALE - LEAST_SCALE) * scale)))
    image, mask = resized(image, mask, side)
    if mirrored < 0.5:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    # From where the square begins: inside the scene, or left of it and above.
    left, top = (int(place * (abs(side - size) + 1)) for place in (across, down))
    if side >= size:
        box = (left, top, left + size, top + size)
        return image.crop(box), mask.crop(box)
    page, targets = Image.new("RGB", (size, size), _MEAN_COLOUR), Image.new("L", (size, size), IGNORED)
    page.paste(image, (left, top))
    targets.paste(mask, (left, top))
    return page, targets
