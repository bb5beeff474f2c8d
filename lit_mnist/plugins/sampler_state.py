"""The state of a DataLoader's samplers between two epochs: a `state_dict`, or numbers in a sampler of the user's."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from lit_mnist.plugins import loader_kinds as kinds
from lit_mnist.plugins.plain_values import as_bytes, as_tensor, pack, unpack

_PLAIN = (bool, int, float, str, type(None))


class SamplerState:
    """Saves and restores the state that the samplers of a dataloader have before an epoch.

    Of a sampler without a `state_dict`, these are the numbers and texts among its attributes that have changed since
    the dataloader was made, such as a count of epochs.

    Args:
        loader: The dataloader. Nothing is saved of one that can seek, as its order is a function of the epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._first = self._numbers()

    def save(self) -> dict[str, Any]:
        """Returns the state as plain values and tensors."""
        if kinds.seekable(self._loader) is not None:
            return {"state": None, "numbers": {}}
        state, sampler = None, kinds.stateful_sampler(self._loader)
        # Without it, a wrong position is found by the indices.
        with suppress(Exception):
            state = None if sampler is None else as_tensor(pack(sampler.state_dict()))
        numbers = {
            place: value
            for place, value in self._numbers().items()
            if place not in self._first or self._first[place] != value
        }
        return {"state": state, "numbers": numbers}

    def load(self, saved: Any) -> None:
        """Restores what `save` has returned."""
        # In the first checkpoints, it was the state alone.
        saved = saved if isinstance(saved, dict) else {"state": saved, "numbers": {}}
        sampler = kinds.stateful_sampler(self._loader)
        if saved["state"] is not None and sampler is not None:
            sampler.load_state_dict(unpack(as_bytes(saved["state"]), torch.device("cpu")))
        samplers = kinds.samplers(self._loader)
        for place, value in saved["numbers"].items():
            depth, _, name = place.partition(".")
            if int(depth) < len(samplers):
                setattr(samplers[int(depth)], name, value)

    def _numbers(self) -> dict[str, Any]:
        return {
            f"{depth}.{name}": value
            for depth, sampler in enumerate(kinds.samplers(self._loader))
            if not kinds.is_of_a_library(sampler) and not kinds.is_stateful(sampler)
            for name, value in getattr(sampler, "__dict__", {}).items()
            if type(value) in _PLAIN
        }
