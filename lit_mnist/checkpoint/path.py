"""The path of a run folder or checkpoint. Imports no torch, so that a missing one is rejected at once."""

from __future__ import annotations

from pathlib import Path

from lit_mnist.errors import InputError


def require_checkpoint(place: Path) -> Path:
    """Returns the path of a run folder or checkpoint.

    Raises:
        InputError: There is nothing at the path, or it cannot be read.
    """
    try:
        if place.exists():
            return place
    except OSError as error:
        raise InputError(f"The checkpoint {place} cannot be read: {error.strerror}.") from error
    raise InputError(f"There is no run folder or checkpoint at {place}.")
