"""How many rows a file has, which tells whether it may hold predictions."""

from __future__ import annotations

import json
from collections.abc import Sized
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

_LARGE = 20_000_000


def rows_of(content: Any, depth: int = 0) -> list[int]:
    """Returns the lengths of the tensors, arrays and lists in a nested value, without repeats."""
    found: set[int] = set()
    if isinstance(content, torch.Tensor | np.ndarray):
        found.add(len(content) if content.ndim else 1)
    elif isinstance(content, dict | list | tuple) and depth < 3:
        if not isinstance(content, dict):
            found.add(len(content))
        for part in list(content.values() if isinstance(content, dict) else content)[:1000]:
            if isinstance(part, Sized):
                found |= set(rows_of(part, depth + 1))
    # The batches of a list are rows together.
    if isinstance(content, list | tuple) and content and all(isinstance(part, torch.Tensor) for part in content):
        found.add(sum(len(part) if part.ndim else 1 for part in content))
    return sorted(found)


def rows_of_file(path: Path) -> list[int]:
    """Returns the numbers of rows that a file has as text (with or without a header), JSON, or NumPy array."""
    with suppress(OSError, ValueError):
        if not path.is_file() or path.stat().st_size > _LARGE:
            return []
        if path.suffix == ".npy":
            return rows_of(np.load(path, mmap_mode="r"))
        text = path.read_text()
        if path.suffix == ".json":
            return rows_of(json.loads(text))
        lines = len([line for line in text.splitlines() if line.strip()])
        return [lines, lines - 1]
    return []
