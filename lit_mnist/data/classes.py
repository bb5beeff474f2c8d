"""The names of the classes of each data set."""

from __future__ import annotations

import string

from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings
from lit_mnist.experiment.registry import DATASETS

_DIGITS = tuple(string.digits)
# In the order of EMNIST, which merges 15 lower-case letters with the upper-case letters that look alike.
_MERGED = (*_DIGITS, *string.ascii_uppercase, *"abdefghnqrt")
_EMNIST_CLASSES: dict[str, tuple[str, ...]] = {
    "byclass": (*_DIGITS, *string.ascii_uppercase, *string.ascii_lowercase),
    "bymerge": _MERGED,
    "balanced": _MERGED,
    "letters": tuple(string.ascii_lowercase),
    "digits": _DIGITS,
    "mnist": _DIGITS,
}
_CLASSES: dict[str, tuple[str, ...]] = {
    "mnist": _DIGITS,
    "fashion_mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    "qmnist": _DIGITS,
}


def class_names(settings: DataSettings) -> tuple[str, ...]:
    """Returns the names of the classes of a data set, without loading any data.

    Raises:
        InputError: There is no such data set or split.
    """
    if own := DATASETS.get(settings.name):
        return own.class_names
    known, key, value = _CLASSES, "data.name", str(settings.name)
    if value == "emnist":
        known, key, value = _EMNIST_CLASSES, "data.emnist_split", settings.emnist_split
    if value not in known:
        names = known if key != "data.name" else (*known, "emnist")
        raise InputError(f"{key} {value!r} is unknown. Choose one of {', '.join(names)}.")
    return known[value]
