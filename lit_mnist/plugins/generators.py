"""The states of the generators of random numbers: those of the process, and those that objects have as attributes."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from lit_mnist.plugins.plain_values import pack

_MOST_OBJECTS = 20_000
_LONGEST_CONTAINER = 1_000
_LEAVES = (str, bytes, int, float, complex, type, FunctionType, ModuleType, torch.Tensor, np.ndarray, torch.device)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def process_generators() -> dict[str, Any]:
    """Returns the states of the generators that every process has: Python's, NumPy's, torch's and the current GPU's."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    # Asking whether there are GPUs takes longer than all of the above.
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().clone()
    return state


def restore_process_generators(state: Mapping[str, Any]) -> None:
    """Restores the states that `process_generators` has returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())


def object_generators(*roots: Any) -> dict[str, Any]:
    """Returns the states of the generators that objects have as attributes, by their places."""
    return states_of(find_generators(*roots))


def states_of(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the states of generators that `find_generators` has found, by their places."""
    return {path: state_of(generator) for path, generator in found}


def restore_object_generators(states: Mapping[str, Any], *roots: Any) -> None:
    """Restores the states that `object_generators` has returned for objects of the same structure."""
    for path, generator in find_generators(*roots):
        if path in states:
            restore_generator(generator, states[path])


def find_generators(*roots: Any) -> Iterator[tuple[str, Any]]:
    """Yields the generators that objects have as attributes, at any depth, with a name for each place.

    It does not find a generator that only a closure refers to.
    """
    stack = [(str(number), root) for number, root in enumerate(roots)]
    # The objects themselves, since the identity of a deleted one may be used again.
    seen: dict[int, Any] = {}
    # Comparing each object with all these classes would take twice as long.
    kinds: dict[type, str] = {}
    while stack and len(seen) < _MOST_OBJECTS:
        path, value = stack.pop()
        if (kind := kinds.get(type(value))) is None:
            kind = kinds[type(value)] = _kind_of(type(value))
        if kind == "leaf" or id(value) in seen:
            continue
        seen[id(value)] = value
        if kind == "generator":
            yield path, value
        elif kind == "container":
            if len(value) <= _LONGEST_CONTAINER:
                pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
                stack += [(f"{path}.{key}", item) for key, item in pairs]
        elif kind == "object" and hasattr(value, "__dict__"):
            stack += [(f"{path}.{key}", item) for key, item in vars(value).items() if key != "_iterator"]


def _kind_of(kind: type) -> str:
    """Returns how `find_generators` treats the instances of a class."""
    if issubclass(kind, (*_LEAVES, type(None))):
        return "leaf"
    if issubclass(kind, GENERATORS):
        return "generator"
    if issubclass(kind, Mapping | list | tuple):
        return "container"
    return "of the Trainer" if kind.__module__.startswith("lightning.pytorch.trainer") else "object"


def state_of(generator: Any) -> Any:
    """Returns the state of a generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def restore_generator(generator: Any, state: Any) -> None:
    """Restores a state that `state_of` has returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def kind_of(generator: Any) -> str | None:
    """Returns what `new_generator` needs, or None if it cannot make such a generator."""
    if type(generator) is np.random.Generator:
        name = type(generator.bit_generator).__name__
        return name if name in _BIT_GENERATORS else None
    if type(generator) is torch.Generator:
        return str(generator.device)
    return {random.Random: "Random", np.random.RandomState: "RandomState"}.get(type(generator))


def new_generator(kind: str) -> Any:
    """Returns a new generator of a kind that `kind_of` has returned."""
    if kind in _BIT_GENERATORS:
        return np.random.Generator(getattr(np.random, kind)())
    if kind == "Random":
        return random.Random()  # noqa: S311 - its state is restored
    return np.random.RandomState() if kind == "RandomState" else torch.Generator(kind)


class RandomStream:
    """Random numbers of its own, for code that draws from the generators of the process.

    Their seed follows from the states of those generators at the start, which the stream does not advance.
    """

    def __init__(self) -> None:
        before = process_generators()
        seed = int.from_bytes(hashlib.sha256(pack(before)).digest()[:4], "little")
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        self._state = process_generators()
        restore_process_generators(before)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replaces the generators of the process within the body."""
        before = process_generators()
        restore_process_generators(self._state)
        try:
            yield
        finally:
            self._state = process_generators()
            restore_process_generators(before)
