"""The generators of NumPy and Python: the global ones, and those that the program has created itself."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable
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
# The global generators, whose methods are the functions of the modules.
_GLOBAL: tuple[Any, ...] = (np.random.get_state, random.getstate)
_OTHERS = {id(function.__self__) for function in _GLOBAL}


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


# The name of the generators that the program has created.
OWN = "a generator that the program has created"


class OwnGenerators:
    """The generators of the program, and their states at a moment."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def find(self) -> None:
        """Adds generators that were created since; the others keep their places, by which states are compared."""
        objects = gc.get_objects()
        known = _OTHERS | name_generators(objects) | set(map(id, self.known))
        self.known += [value for value in objects if type(value) in _KINDS and id(value) not in known]

    def states(self) -> dict[int, str]:
        """Returns digests of their states by their place."""
        return {place: digest(str(_bits(generator))) for place, generator in enumerate(self.known)}

    def copies(self) -> dict[int, Any]:
        """Returns their states by their place, for `drawn`."""
        return {place: _bits(generator) for place, generator in enumerate(self.known)}


def changed(before: dict[int, str], after: dict[int, str]) -> list[str]:
    """Returns the states from which numbers were drawn."""
    return sorted(state for place, state in before.items() if after.get(place) != state)


def drawn(before: dict[int, Any], after: dict[int, Any]) -> dict[str, int]:
    """Returns how many words were drawn since a moment, by the digest of the state; 5,000 for more."""
    return {
        digest(str(state)): _distance(state, after[place])
        for place, state in before.items()
        if place in after and str(state) != str(after[place])
    }


def _distance(before: Any, after: Any) -> int:
    """Returns the number of words between two states of a generator."""
    if isinstance(before, _State):
        return _between(before, after)
    generator = getattr(np.random, before["bit_generator"])()
    generator.state = before
    wanted = str(after["state"])
    for number in range(1, _MOST_DRAWS):
        generator.random_raw()
        if str(generator.state["state"]) == wanted:
            return number
    return _MOST_DRAWS


def _bits(generator: Any) -> Any:
    """Returns a state between which and another one words can be counted."""
    if isinstance(generator, random.Random):
        _, python, kept = generator.getstate()
        return _State(tuple(python[:-1]), python[-1], kept)
    state = (
        generator.bit_generator.state if type(generator) is np.random.Generator else generator.get_state(legacy=False)
    )
    if state["bit_generator"] == "MT19937":
        kept = state.get("has_gauss"), state.get("gauss")
        return _State(tuple(map(int, state["state"]["key"])), int(state["state"]["pos"]), kept)
    return state


def digest_of(states: Iterable[str]) -> str:
    """Returns a digest of several states, in any order."""
    return digest(sorted(states))


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


def seed_generators(seed: int) -> None:
    """Seeds the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


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
