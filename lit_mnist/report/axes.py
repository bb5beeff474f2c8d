"""Axes with round ticks: linear ones (1-2-5 steps) and logarithmic ones (1-2-5 or whole decades)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_mnist.report.formats import SPACE, short


@dataclass(frozen=True)
class Axis:
    """A value axis from `low` to `high` with its ticks, all in data units."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Returns where a value lies on the axis: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def tick_labels(self, *, percent: bool = False) -> list[str]:
        """Returns the ticks as text, all with the decimals that the spacing needs.

        Args:
            percent: The values are shares and are written in percent.
        """
        if self.log:
            return [short(tick) for tick in self.ticks]
        scale, unit = (100, f"{SPACE}%") if percent else (1, "")
        gap = (self.ticks[1] - self.ticks[0]) * scale if len(self.ticks) > 1 else 1.0
        if gap < 1e-5:
            return [short(tick * scale) + unit for tick in self.ticks]
        decimals = max(0, -math.floor(math.log10(gap) + 1e-9))
        return [f"{tick * scale:,.{decimals}f}{unit}" for tick in self.ticks]


def linear_axis(values: Sequence[float], *, least: float, target: int = 5) -> Axis:
    """Returns an axis that covers the values and ends on round ticks.

    Args:
        values: Finite values, at least one.
        least: The smallest distance that the ends may have; it keeps equal values from a zero-length axis.
        target: About how many intervals between ticks.
    """
    low, high = min(values), max(values)
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    step = round_step((high - low) / target)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # n * step leaves rounding dust (3 * 0.1); the step's own digits do not
    digits = 2 - math.floor(math.log10(step))
    ticks = tuple(round(n * step, digits) for n in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(values: Sequence[float]) -> Axis:
    """Returns a logarithmic axis that covers the values and ends on 1, 2 or 5 times a power of ten.

    Args:
        values: Positive finite values, at least two different ones.
    """
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    heads = (1, 2, 5) if high / low < 1000 else (1,)
    grid = [float(f"{head}e{power}") for power in decades for head in heads]
    first = max(n for n, tick in enumerate(grid) if tick <= low)
    last = min(n for n, tick in enumerate(grid) if tick >= high)
    ticks = tuple(grid[first : last + 1])
    # beyond ten decades every label would touch the next
    return Axis(ticks[0], ticks[-1], ticks[:: max(1, math.ceil(len(ticks) / 10))], log=True)


def step_axis(last: float) -> Axis:
    """Returns the axis of optimizer steps: from 0 to exactly the last one, so that the end of training is the edge."""
    last = max(last, 1.0)
    step = max(1.0, round_step(last / 5))
    return Axis(0.0, last, tuple(n * step for n in range(math.floor(last / step + 1e-9) + 1)))


def round_step(rough: float) -> float:
    """Returns the smallest of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = math.floor(math.log10(rough))
    head = next(head for head in (1, 2, 5, 10) if head * (1 + 1e-9) >= rough / 10.0**power)
    return float(f"{head}e{power}")
