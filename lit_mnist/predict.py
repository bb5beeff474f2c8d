"""Classifies your own images of digits with trained weights.

    python -m lit_mnist.predict RUN_DIR_OR_CKPT IMAGE...

It prints a line for each image: the file, the class and its probability. An image is a PNG or JPEG file of one digit on
an even background, dark on light or light on dark.
"""

import argparse
import inspect
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lit_mnist.errors import InputError
from lit_mnist.mnist import normalize
from lit_mnist.module import LitClassifier
from lit_mnist.plugins.checkpoint_io import read_checkpoint

_SIZE, _BOX = 28, 20  # pixels of an image of MNIST, and of the digit in it
_MIN_CONTRAST, _NOISE = 30.0, 16.0  # grey levels of 255: less is no digit, and less than the other is background


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command.

    Args:
        argv: The words of the command; by default those of this process.

    Raises:
        SystemExit: With code 2, a file cannot be used.
    """
    parser = argparse.ArgumentParser(prog="python -m lit_mnist.predict", description="Classifies images of digits.")
    parser.add_argument("checkpoint", metavar="RUN_DIR_OR_CKPT", type=Path, help="a run folder or a checkpoint")
    parser.add_argument("images", metavar="IMAGE", type=Path, nargs="+", help="PNG or JPEG files of one digit each")
    args = parser.parse_args(argv)
    try:
        module = load_classifier(args.checkpoint)
        digits = torch.stack([read_digit(path) for path in args.images])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    with torch.inference_mode():
        probabilities, classes = module.predict_step(normalize(digits.unsqueeze(1).float()), 0).max(dim=1)
    for path, label, probability in zip(args.images, classes.tolist(), probabilities.tolist(), strict=True):
        print(f"{path}\t{label}\t{probability:.4f}")


def load_classifier(path: Path) -> LitClassifier:
    """Returns a trained LitClassifier in evaluation mode, on the CPU.

    Args:
        path: A checkpoint; or a run folder, whose best weights are loaded, or its last ones if there are no best.

    Raises:
        InputError: There is no checkpoint, or it is damaged or not one of LitClassifier.
    """
    if path.is_dir():
        names = [path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
        path = next((each for each in names if each.is_file()), names[0])
    checkpoint = read_checkpoint(path)
    options = checkpoint.get("hyper_parameters", {})
    known = inspect.signature(LitClassifier).parameters
    try:
        module = LitClassifier(**{name: value for name, value in options.items() if name in known})
        module.load_state_dict(checkpoint["state_dict"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise InputError(f"{path} is not a checkpoint of LitClassifier: {error}") from error
    return module.float().eval()


def read_digit(path: Path) -> torch.Tensor:
    """Returns the digit of an image file as MNIST has it, uint8 [28, 28]: light on black, 20 pixels long, centered.

    Raises:
        InputError: The file is not a PNG or JPEG image, or has no digit.
    """
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            colors = image.convert("RGBA")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} cannot be read as a PNG or JPEG image: {error}") from error
    paper = Image.new("RGBA", colors.size, "white")  # where the image is transparent
    grey = np.asarray(Image.alpha_composite(paper, colors).convert("L"), dtype=np.float32)
    background = np.median(np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]]))
    ink = (background - grey if background > 127 else grey - background).clip(0)
    if ink.max() < _MIN_CONTRAST:
        raise InputError(f"{path} has no digit: all of it is as light or dark as its edges.")
    ink *= 255 / ink.max()
    ink[ink < _NOISE] = 0
    return torch.from_numpy(_center(ink))


def _center(ink: np.ndarray) -> np.ndarray:
    """Scales the ink to a box of 20 x 20 pixels, and puts its center of mass in the middle of 28 x 28 pixels.

    So were the images of MNIST made (LeCun et al.: Gradient-Based Learning Applied to Document Recognition, 1998).
    """
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    digit = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = (max(1, round(length * _BOX / max(digit.shape))) for length in digit.shape)
    scaled = np.asarray(Image.fromarray(digit).resize((width, height), Image.Resampling.BICUBIC)).clip(0, 255)
    top, left = (
        min(max(math.ceil(_SIZE / 2 - np.average(np.arange(length) + 0.5, weights=mass)), 0), _SIZE - length)
        for length, mass in ((height, scaled.sum(axis=1)), (width, scaled.sum(axis=0)))
    )
    page = np.zeros((_SIZE, _SIZE), np.uint8)
    page[top : top + height, left : left + width] = scaled.round()
    return page


if __name__ == "__main__":
    main()
