"""Numerical precision: the resolution of `auto`, and the dtypes of each precision."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Literal

import torch

UsedPrecision = Literal["32-true", "64-true", "16-mixed", "bf16-mixed"]

_CPUINFO = Path("/proc/cpuinfo")
_AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


def resolve_precision(precision: UsedPrecision | Literal["auto"], device_type: str) -> UsedPrecision:
    """Returns the precision to use, which depends on the device type (`cpu` or `cuda`) if it is `auto`."""
    if precision != "auto":
        return precision
    if device_type == "cuda":
        return "16-mixed"
    return "bf16-mixed" if _bfloat16_is_fast() else "32-true"


def explain_precision(device_type: str) -> str:
    """Returns a line with the precision that `auto` selects, and the reason."""
    precision = resolve_precision("auto", device_type)
    if device_type == "cuda":
        return f"precision {precision}: the device is a GPU"
    return f"precision {precision}: this CPU has {'' if _bfloat16_is_fast() else 'no '}fast bfloat16 instructions"


@cache
def _bfloat16_is_fast() -> bool:
    if platform.system() != "Linux" or not _CPUINFO.exists():
        return False
    return has_fast_bfloat16(_CPUINFO.read_text())


def has_fast_bfloat16(cpuinfo: str) -> bool:
    """Returns whether bfloat16 is faster than float32 on a processor.

    Without bfloat16 instructions it is slower, and it is on Intel's processors without AMX: on one with AVX512_BF16
    alone, matrix products and convolutions took 1.7 to 2.2 times as long as in float32.

    Args:
        cpuinfo: The content of `/proc/cpuinfo`.
    """
    fields = dict(line.split(":", 1) for line in reversed(cpuinfo.splitlines()) if ":" in line)
    values = {name.strip(): value.split() for name, value in fields.items()}
    flags = {*values.get("flags", ()), *values.get("Features", ())}
    fast = {"amx_bf16"} if values.get("vendor_id") == ["GenuineIntel"] else {"amx_bf16", "avx512_bf16", "bf16"}
    return bool(fast & flags)


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
