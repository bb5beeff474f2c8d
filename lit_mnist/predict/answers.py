"""Predictions of a user's own images as text: one line for each of a few images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lit_mnist.predict.doubts import NO_INK

MOST_LINES = 20


def answers(
    files: Sequence[Path],
    predicted: Sequence[int],
    probability: Sequence[float],
    notes: Sequence[str],
    class_names: Sequence[str],
) -> list[str]:
    """Returns lines such as `one.png -> 7 (99.99 %)`: of up to 20 images of each, of more the number of noted ones.

    Args:
        files: The image files.
        predicted: The predicted classes.
        probability: The softmax probability of each, rounded down so that none reads as certain.
        notes: What speaks against each prediction; see `doubts`.
        class_names: The name of each class.
    """
    if len(files) > MOST_LINES:
        noted = sum(map(bool, notes))
        return [f"uncertain {noted:,} of {len(files):,} images: see their note in the table"] if noted else []
    lines = []
    for file, guess, share, note in zip(files, predicted, probability, notes, strict=True):
        percent = min(math.floor(share * 10_000), 9999) / 100
        answer = "" if note == NO_INK else f"{class_names[guess]} ({percent:.2f} %)"
        lines.append(f"{visible(file)} -> {', '.join(part for part in (answer, note) if part)}")
    return lines


def visible(name: str | Path) -> str:
    """Returns a file's name with everything that a terminal would not show as it stands in Python's notation."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(name))
