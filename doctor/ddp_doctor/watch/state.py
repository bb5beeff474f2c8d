"""What else a record says of a rank: the names of its parameters, the mode of its model, and its generators."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

_MOST_MODULES = 8


def names_of(parameters: Sequence[torch.Tensor], models: Iterable[nn.Module]) -> list[str]:
    """Returns the names of parameters in the models; `parameter N` for one that is in none."""
    known = {
        id(parameter): name.removeprefix("module.") for model in models for name, parameter in model.named_parameters()
    }
    return [known.get(id(parameter), f"parameter {place}") for place, parameter in enumerate(parameters)]


def in_evaluation(models: Iterable[nn.Module]) -> list[str]:
    """Returns the names of some modules in evaluation mode; `[""]` if a model has no other ones."""
    for model in models:
        modes = {name: module.training for name, module in model.named_modules()}
        if not any(modes.values()):
            return [""]
        if not all(modes.values()):
            found = [name.removeprefix("module.") for name, training in modes.items() if not training]
            return found[:_MOST_MODULES]
    return []


def generator_digest() -> str:
    """Returns a digest of the states of torch's generators of the CPU and of the current GPU."""
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state.update(torch.cuda.get_rng_state().numpy().tobytes())
    return state.hexdigest()[:16]
