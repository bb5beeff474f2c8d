"""Long lists of numbers as tensors, which are written and read much faster than lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# Lists that may be as long as a data set.
_LONG = ("indices", "sizes")
_LEAST = 10_000


def packed(event: dict[str, Any]) -> dict[str, Any]:
    """Returns an event with its long lists as tensors, and with NumPy's numbers as Python's, which can be loaded."""
    long = {name: torch.tensor(event[name], device="cpu") for name in _LONG if len(event.get(name, ())) > _LEAST}
    return {**{name: value if name in long else plain(value) for name, value in event.items()}, **long}


def plain(value: Any) -> Any:
    """Returns a value whose numbers are Python's: a program may compute its learning rate with NumPy."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    return type(value)(map(plain, value)) if type(value) in {list, tuple, set} else value


def unpacked(event: dict[str, Any]) -> dict[str, Any]:
    """Returns an event as it was before `packed`."""
    return {**event, **{name: event[name].tolist() for name in _LONG if isinstance(event.get(name), torch.Tensor)}}
