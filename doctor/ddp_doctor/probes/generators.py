"""The generators of NumPy and Python: the global ones, and those that the program has created itself."""

from __future__ import annotations

import gc
import random
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_doctor.records.recorder import digest
from ddp_doctor.torch_internals import name_generators

_KINDS = {np.random.Generator, np.random.RandomState, random.Random}
# Numbers drawn in a step are counted up to here.
_MOST_DRAWS = 5_000
_SEED_PYTHON, _SEED_NUMPY = random.seed, np.random.seed
_METHODS: dict[str, Any] = {"NumPy": np.random.get_state, "Python": random.getstate}
# The global generators, whose methods are the functions of the modules.
_GLOBAL = {name: method.__self__ for name, method in _METHODS.items()}
# A Mersenne Twister computes so many words at once.
_WORDS = 624
_MOST_BLOCKS = 64
# The name of the generators that the program has created.
OWN = "a generator that the program has created"


class _Twister(NamedTuple):
    """The state of a Mersenne Twister."""

    key: tuple[int, ...]
    position: int
    # The second half of a pair of normal numbers, which is kept for the next call.
    kept: Any


class OwnGenerators:
    """The generators of the program."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def find(self) -> None:
        """Adds generators that were created since; the others keep their places, by which states are compared."""
        objects = gc.get_objects()
        known = name_generators(objects) | {id(value) for value in (*_GLOBAL.values(), *self.known)}
        self.known += [value for value in objects if type(value) in _KINDS and id(value) not in known]

    def states(self) -> dict[int, Any]:
        """Returns their states by their place."""
        return {place: _state(generator) for place, generator in enumerate(self.known)}

    def digests(self) -> list[str]:
        """Returns digests of their states, in any order."""
        return sorted(digest(str(state)) for state in self.states().values())


def states_of_global() -> dict[str, Any]:
    """Returns the states of the global generators of NumPy and Python by name."""
    return {name: _state(generator) for name, generator in _GLOBAL.items()}


def values_drawn(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, int]:
    """Returns how many words of 32 bits were drawn from each generator that has changed between two moments.

    The count ends at 40,000 of a Mersenne Twister, and at 5,000 of another generator.
    """
    return {key: _distance(state, after[key]) for key, state in before.items() if str(state) != str(after[key])}


def drawn(before: dict[int, Any], after: dict[int, Any]) -> dict[str, int]:
    """Returns the same by the digest of the state."""
    return {digest(str(before[place])): number for place, number in values_drawn(before, after).items()}


def _distance(before: Any, after: Any) -> int:
    """Returns the number of words between two states of a generator."""
    if isinstance(before, _Twister):
        return _between(before, after)
    generator = getattr(np.random, before["bit_generator"])()
    generator.state = before
    wanted = str(after["state"])
    for number in range(1, _MOST_DRAWS):
        generator.random_raw()
        if str(generator.state["state"]) == wanted:
            return number
    return _MOST_DRAWS


def _between(first: _Twister, second: _Twister) -> int:
    if first.key == second.key:
        # A kept number was used, or words were drawn.
        return max(second.position - first.position, int(first != second))
    generator = np.random.RandomState()
    generator.set_state(("MT19937", np.array(first.key, dtype=np.uint32), first.position, 0, 0.0))
    count = 0
    for _ in range(_MOST_BLOCKS):
        words = _WORDS - _state(generator).position + 1
        # The next word begins a new block.
        generator.randint(0, 2**32, words, dtype=np.uint64)
        count += words
        if _state(generator).key == second.key:
            return count + second.position - 1
    # Many words, unless the generator was only seeded.
    return 0 if second.position == _WORDS else count


def _state(generator: Any) -> Any:
    """Returns a state between which and another one words can be counted."""
    if isinstance(generator, random.Random):
        _, python, kept = generator.getstate()
        return _Twister(tuple(python[:-1]), python[-1], kept)
    made = type(generator) is np.random.Generator
    state = generator.bit_generator.state if made else generator.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        kept = state.get("has_gauss"), state.get("gauss")
        return _Twister(tuple(map(int, state["state"]["key"])), int(state["state"]["pos"]), kept)
    return state


def global_states() -> dict[str, torch.Tensor]:
    """Returns the states of the global generators of torch, NumPy and Python by name."""
    kind, words, position, *_ = np.random.get_state()
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if kind == "MT19937":
        found["numpy"] = torch.tensor([*map(int, words), int(position)])
    found["python"] = torch.tensor(random.getstate()[1])
    return found


def set_global_states(states: dict[str, torch.Tensor]) -> None:
    """Sets the states that `global_states` has returned; nothing happens if one is missing."""
    with suppress(KeyError):
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(states["cuda"])
        random.setstate((3, tuple(states["python"].tolist()), None))
        words = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(words[:-1], dtype=np.uint32), words[-1], 0, 0.0))


def seed_unseen(seed: int) -> None:
    """Seeds the global generators by functions whose probes would take it for the user's."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        # Under emulation, a data set may draw from the generator of the GPU.
        torch.cuda.manual_seed(seed)
    _SEED_PYTHON(seed)
    _SEED_NUMPY(seed)


def generators() -> dict[str, str]:
    """Returns digests of the states of all global generators."""
    # A text of NumPy's words takes a millisecond, and this is called hundreds of times.
    numbers = [
        value.tobytes() if isinstance(value, np.ndarray) else value
        for part in np.random.get_state(legacy=False).values()
        for value in (part.values() if isinstance(part, dict) else [part])
    ]
    others = {"NumPy": digest(numbers), "Python": digest(random.getstate())}
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    return {"torch": digest(states), **others}
