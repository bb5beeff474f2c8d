"""How values are written on the page: escaped text, counts, shares, times and sizes.

What was not measured (None) is an en dash everywhere; a value that is not a number says so.
"""

from __future__ import annotations

import html
import math

MISSING = "\u2013"
SPACE = "\u00a0"  # a number and its unit never part at a line's end
# control characters, which no page may hold
_CONTROL = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(127, 160)), "\ufffd")


def text(value: object) -> str:
    """Returns any value as text that is safe in an element and in a quoted attribute."""
    if value is None:
        return MISSING
    return html.escape(str(value).translate(_CONTROL), quote=True)


def finite(value: object) -> float | None:
    """Returns a figure of a file, or None for what is no finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def number(value: float | None, digits: int = 4) -> str:
    """Returns a number with `digits` significant digits and grouped thousands."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return not_finite(value)
    if value == 0 or 1e-4 <= abs(value) < 10**digits:
        decimals = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
        return f"{value:,.{max(0, decimals)}f}"
    if abs(value) < 1:
        return short(float(f"{value:.{digits - 1}e}"))
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Returns the shortest usual writing of a number, for ticks: `0.05`, `1e-5`."""
    mantissa, exponent, power = f"{value:.6g}".partition("e")
    return f"{mantissa}e{int(power)}" if exponent else mantissa


def count(value: float | None) -> str:
    """Returns a whole number with grouped thousands."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if math.isfinite(value) else not_finite(value)


def percent(share: float | None, samples: int | None = None) -> str:
    """Returns a share (0 to 1) in percent, with so many decimals, at least two, that one of the `samples` is seen."""
    if share is None:
        return MISSING
    if not math.isfinite(share):
        return not_finite(share)
    decimals = max(2, len(str(samples - 1)) - 2) if samples else 2
    return f"{100 * share:.{decimals}f}{SPACE}%"


def duration(seconds: float | None) -> str:
    """Returns seconds as `41.2 s`, `12 min 05 s` or `3 h 07 min`."""
    if seconds is None:
        return MISSING
    if not math.isfinite(seconds):
        return not_finite(seconds)
    if seconds < 59.95:
        return f"{seconds:.{1 if seconds >= 1 else 3}f}{SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min{SPACE}{rest:02d}{SPACE}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{SPACE}h{SPACE}{minutes:02d}{SPACE}min"


def size(bytes_: float | None) -> str:
    """Returns bytes in binary units: `512 B`, `812.4 MiB`, `1.3 GiB`."""
    if bytes_ is None:
        return MISSING
    if not math.isfinite(bytes_):
        return not_finite(bytes_)
    if bytes_ < 1024:
        return f"{bytes_:.0f}{SPACE}B"
    power = min(4, int(math.log(bytes_, 1024)))
    return f"{bytes_ / 1024**power:,.1f}{SPACE}{('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def not_finite(value: float) -> str:
    """Returns how a value reads that was measured and is no number: NaN or an infinity with its sign."""
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "\u2212∞"
