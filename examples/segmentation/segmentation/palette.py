"""The colors of Pascal VOC's classes: masks as palette PNGs, and images tinted with the colors."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

# The documentation of VOC's development kit describes its color map: bits 0, 3 and 6 of a class are the highest bits of
# red, 1, 4 and 7 those of green, 2 and 5 those of blue, the lowest first.
_BITS = (np.arange(256)[:, None] >> np.arange(9)) & 1
_WEIGHTS = 128 >> np.arange(3)
# Red, green and blue of each class, uint8 [256, 3]; 255, the border, is a light grey.
PALETTE = np.stack([_BITS[:, channel::3] @ _WEIGHTS for channel in range(3)], axis=1).astype(np.uint8)


def palette_png(mask: npt.NDArray[np.uint8]) -> bytes:
    """Encodes a mask of classes, uint8 [height, width], as a PNG whose palette indices are the classes."""
    image = Image.fromarray(mask).convert("L")
    image.putpalette(PALETTE.tobytes())
    buffer = io.BytesIO()
    # Always 8 bits: not every reader supports palettes with fewer.
    image.save(buffer, "PNG", bits=8, compress_level=6)
    return buffer.getvalue()


def tint(image: npt.NDArray[np.uint8], mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Tints each class except the background with its color: fully along its edge, and half inside.

    Args:
        image: Red, green and blue, uint8 [height, width, 3].
        mask: Its classes, uint8 [height, width].
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
