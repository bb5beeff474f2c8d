"""Numerical precision: the resolution of `auto`, and the dtypes of each precision."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Literal

import torch

UsedPrecision = Literal["32-true", "64-true", "16-mixed", "bf16-mixed"]

_AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def resolve_precision(precision: UsedPrecision | Literal["auto"], device_type: str) -> UsedPrecision:
    """Returns the precision to use, which depends on the device type (`cpu` or `cuda`) if it is `auto`."""
    if precision != "auto":
        return precision
    if device_type == "cuda":
        return "16-mixed"
    return "bf16-mixed" if cpu_computes_bfloat16() else "32-true"


def explain_precision(device_type: str) -> str:
    """Returns a line with the precision that `auto` selects, and the reason."""
    precision = resolve_precision("auto", device_type)
    if device_type == "cuda":
        return f"precision {precision}: the device is a GPU"
    return f"precision {precision}: this CPU has {'' if cpu_computes_bfloat16() else 'no '}bfloat16 instructions"


@cache
def cpu_computes_bfloat16() -> bool:
    """Returns whether the processor has bfloat16 instructions. Without them, bfloat16 is slower than float32."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not cpuinfo.exists():
        return False
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split()))
    return False


def autocast_dtype(precision: UsedPrecision) -> torch.dtype | None:
    """Returns the dtype of autocast, or None if the precision does not use autocast."""
    return _AUTOCAST.get(precision)


def autocast(precision: UsedPrecision, device: torch.device) -> torch.autocast:
    """Returns the autocast context for the forward pass. As in Lightning, casts are not cached."""
    dtype = autocast_dtype(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def weight_dtype(precision: UsedPrecision) -> torch.dtype:
    """Returns the dtype of the weights and images."""
    return torch.float64 if precision == "64-true" else torch.float32


def needs_scaler(precision: UsedPrecision) -> bool:
    """Returns whether the loss must be scaled, because small gradients would underflow (Micikevicius et al., 2018)."""
    return precision == "16-mixed"
