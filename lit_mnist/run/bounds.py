"""The check that the numbers of a section are in range."""

from __future__ import annotations

import math

from lit_mnist.errors import require


def check_bounds(section: str, settings: object, *names: str, low: float, high: float = math.inf) -> None:
    """Rejects settings outside of [low, high]; None, for unset, is accepted.

    Raises:
        InputError: A setting is out of range; the message names it.
    """
    limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    for name in names:
        value = getattr(settings, name)
        require(value is None or low <= value <= high, f"{section}.{name} must be {limits}, but is {value}.")
