"""Mixed precision of emulated GPUs: autocast of the CPU in the type of the GPU. A GradScaler works on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from ddp_doctor.emulation.devices import replaced

# Keeps the kernel that is registered.
_libraries: list[torch.library.Library] = []
# The type that autocast uses on a GPU by default; that of the CPU is bfloat16.
_dtype = [torch.float16]


def install_precision() -> None:
    """Replaces what names a device of mixed precision."""
    replaced(autocast, "__init__", _autocast)
    replaced(torch, "is_autocast_enabled", _of_device("cuda"))
    replaced(torch, "set_autocast_enabled", _set_enabled)
    replaced(torch, "get_autocast_dtype", _of_device())
    replaced(torch, "get_autocast_gpu_dtype", lambda original: lambda: _dtype[0])
    replaced(torch, "set_autocast_dtype", _of_device())
    _libraries.append(accumulate_convolutions())


def accumulate_convolutions() -> torch.library.Library:
    """Lets the backward pass of a convolution in float16 add in 32 bits, as a GPU does.

    The CPU's own kernel needs a hundred times as long.
    """
    name = "convolution_backward"
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def backward(keys: Any, gradient: torch.Tensor, *args: Any) -> Any:
        if gradient.dtype is not torch.float16:
            return original.call_boxed(keys, gradient, *args)
        # The input and the weight.
        wide = [part.float() for part in (gradient, *args[:2])]
        found = original.call_boxed(keys, *wide, *args[2:])
        return tuple(part if part is None else part.half() for part in found)

    library = torch.library.Library("aten", "IMPL")
    library.impl(name, backward, "CPU", with_keyset=True)
    return library


def _autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        on_gpu = device_type == "cuda"
        dtype = _dtype[0] if on_gpu and dtype is None else dtype
        original(self, "cpu" if on_gpu else device_type, dtype, enabled, cache_enabled)

    return make


def _of_device(*default: str) -> Callable[..., Any]:
    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            device, *rest = args or default or ("cuda",)
            return original("cpu" if device == "cuda" else device, *rest, **kwargs)

        return call

    return replace


def _set_enabled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any) -> None:
        device, enabled = args if len(args) == 2 else ("cuda", args[0])
        original("cpu" if device == "cuda" else device, enabled)

    return call
