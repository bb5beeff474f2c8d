"""Reads a registered data set into memory, as digits, and checks that a sample depends on its index alone."""

from __future__ import annotations

import hashlib
import operator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lit_mnist.data.digits.split import Split
from lit_mnist.errors import InputError
from lit_mnist.experiment.registry import Registered

# Samples of each part that are read twice.
_READ_TWICE = 100
_SHAPE = (28, 28)


def load_registered_dataset(registered: Registered, root: Path | None) -> tuple[str, str, Split, Split]:
    """Reads a registered data set.

    Args:
        registered: The data set.
        root: `data.root`, passed on if the function has an argument of this name.

    Returns:
        The source: the dotted name of what was registered; the SHA-256 over the bytes of the four tensors (training
        images, training labels, test images, test labels); the training and the test split.

    Raises:
        InputError: A sample has another form, or differs when it is read again; the message says what to change.
    """
    parts = _make(registered, root)
    splits = [_read(registered, name, part) for name, part in parts.items()]
    # Made again: a generator without a seed would give each rank other data.
    for (name, part), split in zip(_make(registered, root).items(), splits, strict=True):
        _check_again(registered, name, part, split)
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.images.numpy().data)
        digest.update(split.labels.numpy().astype("<i8", copy=False).data)
    train, test = splits
    return f"registered by {registered.path}", digest.hexdigest(), train, test


def _make(registered: Registered, root: Path | None) -> dict[str, Any]:
    """Returns the training and the test part."""
    made = registered.call(**({"root": root} if root else {}))
    if not isinstance(made, tuple | list):
        made = getattr(made, "train", None), getattr(made, "test", None)
    if len(made) != 2 or any(not hasattr(part, "__getitem__") or not hasattr(part, "__len__") for part in made):
        raise InputError(
            f"{registered.title}: {registered.path} must return (train, test), two data sets with __len__ and "
            "__getitem__."
        )
    return dict(zip(("training", "test"), made, strict=True))


def _read(registered: Registered, name: str, part: Any) -> Split:
    """Returns a part as tensors, by numpy: torch might start threads before the fork."""
    count = registered.guard(f"len of its {name} set", lambda: len(part))
    if not count:
        raise InputError(f"{registered.title}: its {name} set is empty: return at least one sample.")
    images, labels = np.empty((count, *_SHAPE), dtype=np.uint8), np.empty(count, dtype=np.int64)
    for index in range(count):
        images[index], labels[index] = _sample(registered, name, part, index)
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def _check_again(registered: Registered, name: str, part: Any, split: Split) -> None:
    differs = "" if registered.guard(f"len of its {name} set", lambda: len(part)) == len(split) else "the length"
    # Backwards, so that a sample that depends on the one before also differs.
    for index in np.unique(np.linspace(0, len(split) - 1, _READ_TWICE).astype(int))[::-1].tolist():
        if differs:
            break
        image, label = _sample(registered, name, part, index)
        if label != split.labels[index] or not np.array_equal(image, split.images[index].numpy()):
            differs = f"item {index}"
    if differs:
        raise InputError(
            f"{registered.title}: {differs} of its {name} set differs when it is read again: __getitem__(i) must "
            "depend on i alone. Draw nothing at random in it (data.augment augments), and give every generator a fixed "
            "seed."
        )


def _sample(registered: Registered, name: str, part: Any, index: int) -> tuple[npt.NDArray[np.uint8], int]:
    """Returns the image and the label of a sample, checked."""
    what = f"item {index} of its {name} set"
    sample = registered.guard(what, lambda: part[index])
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise InputError(f"{registered.title}: {what} is a {type(sample).__name__}: return (image, label).")
    image, label = sample
    pixels = image.numpy(force=True) if isinstance(image, torch.Tensor) else np.asarray(image)
    if pixels.dtype != np.uint8:
        raise InputError(
            f"{registered.title}: the image of {what} is {pixels.dtype}: return the grey values 0 to 255 as uint8, "
            "without ToTensor or Normalize. The project normalizes them."
        )
    if pixels.shape != _SHAPE:
        raise InputError(
            f"{registered.title}: the image of {what} has the shape {list(pixels.shape)}: return 28x28 grey values, "
            "without a dimension for channels. Of a PIL image: image.convert('L').resize((28, 28))."
        )
    try:
        number = operator.index(label)
    except TypeError:
        number = -1
    if isinstance(label, bool) or not 0 <= number < len(registered.class_names):
        raise InputError(
            f"{registered.title}: the label of {what} is {' '.join(str(label).split())[:100]}: return an integer from "
            f"0 to {len(registered.class_names) - 1}, as there are {len(registered.class_names)} class_names."
        )
    return pixels, number
