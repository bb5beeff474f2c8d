"""Number formats for pages and tables. A missing value (None, or undefined in a template) is an en dash."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

MISSING = "\u2013"
SPACE = "\u00a0"  # keeps a number and its unit on one line

P = ParamSpec("P")


def _measured(write: Callable[Concatenate[float, P], str]) -> Callable[Concatenate[object, P], str]:
    """Extends a format to values that are missing or not finite."""

    @wraps(write)
    def written(value: object, /, *args: P.args, **kwargs: P.kwargs) -> str:
        if not isinstance(value, int | float):
            return MISSING
        if math.isfinite(value):
            return write(value, *args, **kwargs)
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "\u2212∞"

    return written


@_measured
def number(value: float, digits: int = 4) -> str:
    """Returns a number with `digits` significant digits and grouped thousands."""
    if value == 0 or 1e-4 <= abs(value) < 10**digits:
        decimals = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
        return f"{value:,.{max(0, decimals)}f}"
    if abs(value) < 1:
        return short(float(f"{value:.{digits - 1}e}"))
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Returns the shortest form of a number, for ticks: `0.05`, `1e-5`."""
    mantissa, exponent, power = f"{value:.6g}".partition("e")
    return f"{mantissa}e{int(power)}" if exponent else mantissa


@_measured
def count(value: float) -> str:
    """Returns a whole number with grouped thousands."""
    return f"{value:,.0f}"


@_measured
def percent(share: float, samples: int | None = None) -> str:
    """Returns a share (0 to 1) in percent, with two decimals, or more if one of `samples` requires them."""
    decimals = max(2, len(str(samples - 1)) - 2) if samples else 2
    return f"{100 * share:.{decimals}f}{SPACE}%"


@_measured
def signed(value: float, decimals: int = 2) -> str:
    """Returns a number with its sign."""
    # Adding zero removes the sign of a rounded zero.
    return f"{round(value, decimals) + 0.0:+,.{decimals}f}".replace("-", "\u2212")


@_measured
def duration(seconds: float) -> str:
    """Returns seconds as `41.2 s`, `12 min 05 s` or `3 h 07 min`."""
    if seconds < 59.95:
        return f"{seconds:.{1 if seconds >= 1 else 3}f}{SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min{SPACE}{rest:02d}{SPACE}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{SPACE}h{SPACE}{minutes:02d}{SPACE}min"


@_measured
def size(bytes_: float) -> str:
    """Returns bytes in binary units: `512 B`, `812.4 MiB`, `1.3 GiB`."""
    if bytes_ < 1024:
        return f"{bytes_:.0f}{SPACE}B"
    power = min(4, int(math.log(bytes_, 1024)))
    return f"{bytes_ / 1024**power:,.1f}{SPACE}{('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def plural(value: object, word: str) -> str:
    """Returns a count with its noun: `1 rank`, `2 ranks`."""
    return f"{count(value)}{SPACE}{word}{'' if value == 1 else 's'}"
