"""Writes a small folder in the form of Pascal VOC: odd sizes, grey and CMYK images, a mask that is only border."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from segmentation.palette import palette_png
from segmentation.voc import IMAGES, LISTS, MASKS

# Width and height in pixels, and the image's mode, of image after image.
KINDS = (((61, 47), "RGB"), ((33, 64), "L"), ((50, 50), "CMYK"), ((97, 40), "RGB"), ((40, 71), "RGB"))
ONLY_BORDER = 3


def write_image(folder: Path, name: str, number: int) -> None:
    """Writes a image of noise with a bright block in it, whose class depends on the number."""
    noise = np.random.default_rng(number)
    (width, height), mode = KINDS[number % len(KINDS)]
    pixels = noise.integers(0, 100, (height, width, 3), dtype=np.uint8)
    mask = np.zeros((height, width), np.uint8)
    top, left = noise.integers(0, height // 2), noise.integers(0, width // 2)
    block = np.s_[top : top + height // 2, left : left + width // 2]
    pixels[block] += 120
    mask[block] = 1 + number % 20
    mask[top, left : left + width // 2] = 255
    if number % 8 == ONLY_BORDER:
        mask[:] = 255
    Image.fromarray(pixels).convert(mode).save(folder / IMAGES / f"{name}.jpg")
    (folder / MASKS / f"{name}.png").write_bytes(palette_png(mask))


def write_voc(root: Path, train: int = 16, test: int = 6) -> Path:
    """Writes `VOCdevkit/VOC2012` into a folder and returns that."""
    folder = root / "VOCdevkit" / "VOC2012"
    for place in (LISTS, IMAGES, MASKS):
        (folder / place).mkdir(parents=True)
    names = [f"2007_{number:06}" for number in range(train + test)]
    for number, name in enumerate(names):
        write_image(folder, name, number)
    (folder / LISTS / "train.txt").write_text("\n".join(names[:train]) + "\n")
    (folder / LISTS / "val.txt").write_text("\n".join(names[train:]) + "\n")
    return folder
