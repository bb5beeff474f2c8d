"""The best and worst segmentation images, with their masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from PIL import Image

from lit_mnist.data.segmentation.palette import PALETTE, tint
from lit_mnist.report.html import data_url

_MAX_SIDE = 320  # pixels of an image's longer side on the page


@dataclass(frozen=True, eq=False)
class ShownImage:
    """A test image and its predicted classes.

    Args:
        image: Red, green and blue, uint8 [height, width, 3].
        truth: The true classes, uint8 [height, width]; 255 for no class.
        predicted: The predicted classes, uint8 [height, width].
        name: The name of the image.
        index: Its index in the test set.
        score: Its mean IoU, from 0 to 1.
    """

    image: npt.NDArray[np.uint8]
    truth: npt.NDArray[np.uint8]
    predicted: npt.NDArray[np.uint8]
    name: str
    index: int
    score: float

    @cached_property
    def views(self) -> list[tuple[str, str]]:
        """The name and the data URL of each view: the image, with the true classes, with the predicted classes."""
        views = {
            "image": self.image,
            "true classes": tint(self.image, self.truth),
            "predicted classes": tint(self.image, self.predicted),
        }
        return [(kind, _thumbnail(pixels)) for kind, pixels in views.items()]


def best_and_worst(images: Sequence[ShownImage]) -> dict[str, list[ShownImage]]:
    """Returns the best images, best first, and the worst, worst first."""
    ordered = sorted(images, key=lambda image: (-image.score, image.index))
    half = (len(ordered) + 1) // 2
    return {"Best": ordered[:half], "Worst": ordered[half:][::-1]}


def colors(images: Sequence[ShownImage], class_names: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the name and the CSS color of each class in the images, except the background."""
    masks = [mask for image in images for mask in (image.truth, image.predicted)]
    seen = sorted({int(n) for mask in masks for n in np.unique(mask)})
    return [(class_names[n], f"rgb({','.join(map(str, PALETTE[n]))})") for n in seen if 0 < n < len(class_names)]


def _thumbnail(pixels: npt.NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    return data_url(image, "JPEG", quality=85)
