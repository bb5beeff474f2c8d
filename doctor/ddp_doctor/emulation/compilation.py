"""torch.compile and torch.jit.script without compilation: modules and functions are called as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp_doctor.emulation.torch_internals import optimized_module


def install_compilation() -> None:
    """Replaces torch.compile and torch.jit.script."""
    torch.compile = _compile
    # It compiles the source of the functions that are called, and the emulated ones have another.
    torch.jit.script = lambda obj=None, *_, **__: obj


def _compile(model: Any = None, **kwargs: Any) -> Any:
    if model is None:
        return lambda function: _compile(function, **kwargs)
    if isinstance(model, nn.Module):
        # Its weights have the prefix `_orig_mod.`, as after a compilation.
        return optimized_module(model)
    return model
