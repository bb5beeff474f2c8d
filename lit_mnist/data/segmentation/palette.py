"""The classes' colours of Pascal VOC: masks as palette PNGs, and images tinted with them."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image


def _colours() -> npt.NDArray[np.uint8]:
    """Returns VOC's colour of each class, uint8 [256, 3].

    A class's bits 0, 3 and 6 are the highest of red's bits, 1, 4 and 7 of green's, 2 and 5 of blue's, the lowest
    first: as the development kit's documentation describes its colour map.
    """
    bits = (np.arange(256)[:, None] >> np.arange(9)) & 1
    weights = 128 >> np.arange(3)
    return np.stack([bits[:, channel::3] @ weights for channel in range(3)], axis=1).astype(np.uint8)


# Red, green and blue of each class, uint8 [256, 3]; 255, the border, is a light grey.
PALETTE = _colours()


def palette_png(mask: npt.NDArray[np.uint8]) -> bytes:
    """Returns a mask of classes, uint8 [height, width], as a PNG whose pixels are the classes themselves."""
    image = Image.fromarray(mask).convert("L")
    image.putpalette(PALETTE.tobytes())
    buffer = io.BytesIO()
    # No bits are saved: a reader need not know of palettes with fewer than 8.
    image.save(buffer, "PNG", bits=8, compress_level=6)
    return buffer.getvalue()


def tinted(image: npt.NDArray[np.uint8], mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns a image, uint8 [height, width, 3], in which each class but the background has its colour.

    Args:
        image: Red, green and blue, uint8 [height, width, 3].
        mask: Its classes, uint8 [height, width]; along the edge of a class the colour is full, inside it is half.
    """
    edge = np.zeros(mask.shape, bool)
    for one, other in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        differ = mask[one] != mask[other]
        edge[one] |= differ
        edge[other] |= differ
    colours = PALETTE[mask]
    mixed = ((image.astype(np.uint16) + colours + 1) // 2).astype(np.uint8)
    shown = np.where(edge[..., None], colours, mixed)
    return np.where((mask == 0)[..., None], image, shown)
