"""The generators of NumPy and Python: the global ones, and those that the program has created itself."""

import gc
import pickle
import random
from typing import Any

import numpy as np
import torch

from ddp_doctor.records.recorder import digest
from ddp_doctor.torch_internals import name_generators

_KINDS = {np.random.Generator, np.random.RandomState, random.Random}
# Words drawn in a step are counted up to here.
_MOST_DRAWS = 10_000
_SEED_PYTHON, _SEED_NUMPY = random.seed, np.random.seed
_METHODS: dict[str, Any] = {"NumPy": np.random.get_state, "Python": random.getstate}
# The global generators, whose methods are the functions of the modules.
_GLOBAL = {name: method.__self__ for name, method in _METHODS.items()}
# A Mersenne Twister computes so many words at once.
_WORDS = 624


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

    def drawn(self, before: dict[int, Any]) -> dict[str, int]:
        """Returns how many words were drawn from each since it had these states, by the digest of the state."""
        return {digest(before[place]): number for place, number in values_drawn(before, self.states()).items()}


def states_of_global() -> dict[str, Any]:
    """Returns the states of the global generators of NumPy and Python by name."""
    return {name: _state(generator) for name, generator in _GLOBAL.items()}


def values_drawn(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, int]:
    """Returns how many words were drawn from each generator that has changed between two moments, up to 10,000."""
    return {key: _distance(state, after[key]) for key, state in before.items() if digest(state) != digest(after[key])}


def _distance(before: Any, after: Any) -> int:
    """Returns the number of words between two states of a generator, which are not equal."""
    generator = getattr(np.random, before["bit_generator"])()
    generator.state = before
    wanted, end, count = after["state"], after["state"].get("pos", 0), 0
    while count < _MOST_DRAWS:
        state = generator.state["state"]
        position = state.get("pos", _WORDS)
        if all(np.array_equal(value, wanted[name]) for name, value in state.items() if name != "pos"):
            # At the same position, the second half of a pair of normal numbers was used.
            return max(count + end - position, 1) if end else count
        # The next word begins a new block of a Mersenne Twister.
        words = _WORDS - position + 1
        generator.random_raw(words, output=False)
        count += words
    # Many words, unless the generator was only seeded.
    return 0 if end == _WORDS else count


def _state(generator: Any) -> dict[str, Any]:
    """Returns a state as that of a bit generator of NumPy."""
    if isinstance(generator, random.Random):
        _, words, kept = generator.getstate()
        state = {"key": np.array(words[:-1], dtype=np.uint32), "pos": words[-1]}
        return {"bit_generator": "MT19937", "state": state, "kept": kept}
    made = type(generator) is np.random.Generator
    found: dict[str, Any] = generator.bit_generator.state if made else generator.get_state(legacy=False)
    return found


def global_states() -> dict[str, torch.Tensor]:
    """Returns the states of the global generators of torch, NumPy and Python by name."""
    others = bytearray(pickle.dumps((random.getstate(), np.random.get_state())))
    found = {"torch": torch.get_rng_state(), "others": torch.frombuffer(others, dtype=torch.uint8)}
    return {**found, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else found


def set_global_states(states: dict[str, torch.Tensor]) -> None:
    """Sets the states that `global_states` has returned, if there are any."""
    if not states:
        return
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    python, numpy = pickle.loads(states["others"].numpy().tobytes())  # noqa: S301
    random.setstate(python)
    np.random.set_state(numpy)


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
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
    return {"torch": digest(states), **{name: digest(state) for name, state in states_of_global().items()}}
