"""Random generators: how many numbers were drawn from those of NumPy and Python, and those of objects."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch

# Both are Mersenne Twisters, which compute so many words at once.
_WORDS = 624
_MOST_BLOCKS = 64


class _State(NamedTuple):
    key: tuple[int, ...]
    position: int
    # The second half of a pair of normal numbers, which is kept for the next call.
    kept: Any


class States:
    """The states of the global generators of NumPy and Python at this moment."""

    def __init__(self) -> None:
        numpy: Any = np.random.get_state()
        _, python, kept = random.getstate()
        known = numpy[0] == "MT19937"
        self.by_name: dict[str, _State | None] = {
            "NumPy": _State(tuple(map(int, numpy[1])), int(numpy[2]), numpy[3:]) if known else None,
            "Python": _State(tuple(python[:-1]), python[-1], kept),
        }


def values_drawn(before: States, after: States) -> dict[str, int]:
    """Returns how many words of 32 bits were drawn from each generator between two moments, up to 40,000."""
    return {
        name: _between(first, second) if first and (second := after.by_name[name]) else 0
        for name, first in before.by_name.items()
    }


def _between(first: _State, second: _State) -> int:
    if first.key == second.key:
        # A kept number was used, or words were drawn.
        return max(second.position - first.position, int(first != second))
    generator = np.random.RandomState()
    generator.set_state(("MT19937", np.array(first.key, dtype=np.uint32), first.position, 0, 0.0))
    count = 0
    for _ in range(_MOST_BLOCKS):
        position = int(_state(generator)[2])
        # The next word begins a new block.
        generator.randint(0, 2**32, _WORDS - position + 1, dtype=np.uint64)
        count += _WORDS - position + 1
        if tuple(map(int, _state(generator)[1])) == second.key:
            return count + second.position - 1
    # Many words, unless the generator was only seeded.
    return 0 if second.position == _WORDS else count


def _state(generator: np.random.RandomState) -> Any:
    return generator.get_state(legacy=True)


def seed_own(owner: Any, seed: int, depth: int = 0) -> None:
    """Seeds the generators that an object, its parts, or what it wraps keep in their attributes."""
    if isinstance(owner, torch.Generator):
        owner.manual_seed(seed)
    elif isinstance(owner, random.Random | np.random.RandomState):
        owner.seed(seed)
    elif isinstance(owner, np.random.Generator):
        owner.bit_generator.state = type(owner.bit_generator)(seed).state
    elif depth < 3 and hasattr(owner, "__dict__"):
        parts = list(owner.modules())[1:] if isinstance(owner, torch.nn.Module) else []
        for value in [*vars(owner).values(), *parts]:
            seed_own(value, seed, depth + 1)
