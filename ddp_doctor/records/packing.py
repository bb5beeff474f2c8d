"""Long lists of numbers as tensors, which are written and read much faster than lists."""

from __future__ import annotations

from typing import Any

import torch

# Lists that may be as long as a data set.
_LONG = ("indices", "sizes")
_LEAST = 10_000


def packed(event: dict[str, Any]) -> dict[str, Any]:
    """Returns an event with its long lists as tensors."""
    long = {name: torch.tensor(event[name], device="cpu") for name in _LONG if len(event.get(name, ())) > _LEAST}
    return {**event, **long}


def unpacked(event: dict[str, Any]) -> dict[str, Any]:
    """Returns an event as it was before `packed`."""
    return {**event, **{name: event[name].tolist() for name in _LONG if isinstance(event.get(name), torch.Tensor)}}
