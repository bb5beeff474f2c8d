"""The colors of the classes of Pascal VOC: masks as palette PNGs, and images tinted with the colors."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image


def _colors() -> npt.NDArray[np.uint8]:
    """Returns VOC's color of each class, uint8 [256, 3].

    Bits 0, 3 and 6 of a class are the highest bits of red, 1, 4 and 7 those of green, 2 and 5 those of blue, the lowest
    first, as the documentation of VOC's development kit describes its color map.
    """
    bits = (np.arange(256)[:, None] >> np.arange(9)) & 1
    weights = 128 >> np.arange(3)
    return np.stack([bits[:, channel::3] @ weights for channel in range(3)], axis=1).astype(np.uint8)


# Red, green and blue of each class, uint8 [256, 3]; 255, the border, is a light grey.
PALETTE = _colors()


def palette_png(mask: npt.NDArray[np.uint8]) -> bytes:
    """Returns a mask of classes, uint8 [height, width], as a PNG whose pixels are the classes themselves."""
    image = Image.fromarray(mask).convert("L")
    image.putpalette(PALETTE.tobytes())
    buffer = io.BytesIO()
    # Always 8 bits: not every reader supports palettes with fewer.
    image.save(buffer, "PNG", bits=8, compress_level=6)
    return buffer.getvalue()


def tinted(image: npt.NDArray[np.uint8], mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns an image, uint8 [height, width, 3], in which each class but the background has its color.

    Args:
        image: Red, green and blue, uint8 [height, width, 3].
        mask: Its classes, uint8 [height, width]; the color is full along the edge of a class, and half inside.
    """
    edge = np.zeros(mask.shape, bool)
    for one, other in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        differ = mask[one] != mask[other]
        edge[one] |= differ
        edge[other] |= differ
    colors = PALETTE[mask]
    mixed = ((image.astype(np.uint16) + colors + 1) // 2).astype(np.uint8)
    shown = np.where(edge[..., None], colors, mixed)
    return np.where((mask == 0)[..., None], image, shown)
