"""Plots as inline SVG, which `templates/plot.html.jinja` draws.

A plot stretches to the width of the page, but text and line widths keep their size: positions are percentages, and
only the lines are in an inner image that is scaled unevenly. The style sheet has the colors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_mnist.report.formats import SPACE, count, percent, short

Point = tuple[float, float]

MAX_POINTS = 400  # longer curves are drawn as means with their range
MAX_DOTS = 24
STYLES = tuple(f"c{n}" for n in range(6))  # the line styles of the style sheet
_GRID = 1000  # units of the inner image


def place(share: float) -> str:
    """Returns a share of the width or height as a percentage."""
    return f"{100 * share:.2f}%"


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high` with its ticks, all in data units."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Returns the position of a value: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def tick_labels(self, *, percent: bool = False) -> list[str]:
        """Returns the ticks as text, all with the same number of decimals."""
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
        least: Minimum length of the axis.
        target: Approximate number of intervals.
    """
    low, high = min(values), max(values)
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    step = _round_up((high - low) / target)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # n * step has rounding errors (3 * 0.1): keep the digits of the step.
    digits = 2 - math.floor(math.log10(step))
    ticks = tuple(round(n * step, digits) for n in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def log_axis(values: Sequence[float]) -> Axis:
    """Returns a logarithmic axis that covers positive, not all equal values, and ends on 1, 2 or 5 times 10**n."""
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    heads = (1, 2, 5) if high / low < 1000 else (1,)
    grid = [float(f"{head}e{power}") for power in decades for head in heads]
    first = max(n for n, tick in enumerate(grid) if tick <= low)
    last = min(n for n, tick in enumerate(grid) if tick >= high)
    ticks = tuple(grid[first : last + 1])
    # Beyond ten decades the labels would touch.
    return Axis(ticks[0], ticks[-1], ticks[:: max(1, math.ceil(len(ticks) / 10))], log=True)


def loss_axis(values: Sequence[float]) -> Axis:
    """Returns an axis for losses, logarithmic if they span a factor of ten or more."""
    if min(values) > 0 and max(values) / min(values) >= 10:
        return log_axis(values)
    return linear_axis(values, least=0.1 * max(map(abs, values)) or 1.0)


def step_axis(last: float) -> Axis:
    """Returns the axis of the optimizer steps, which ends at the last step."""
    last = max(last, 1.0)
    step = max(1.0, _round_up(last / 5))
    return Axis(0.0, last, tuple(n * step for n in range(math.floor(last / step + 1e-9) + 1)))


def _round_up(rough: float) -> float:
    """Returns the smallest 1, 2 or 5 times a power of ten that is at least `rough`."""
    power = math.floor(math.log10(rough))
    head = next(head for head in (1, 2, 5, 10) if head * (1 + 1e-9) >= rough / 10.0**power)
    return float(f"{head}e{power}")


@dataclass(frozen=True)
class Series:
    """A curve: its CSS class, its name and value in the legend, and its points from left to right."""

    style: str
    name: str
    value: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Plot:
    """Curves over a common horizontal axis.

    Attributes:
        title: The title.
        unit: The unit of the vertical axis.
        series: The curves.
        x: The horizontal axis.
        y: The vertical axis.
        x_name: The name of the horizontal axis.
        percent: Whether the vertical values are shares, shown in percent.
        rules: Positions of dotted vertical lines.
    """

    title: str
    unit: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    x_name: str = "optimizer step"
    percent: bool = False
    rules: Sequence[float] = ()

    @property
    def summary(self) -> str:
        """The description for screen readers."""
        named = ", ".join(f"{series.name} {series.value}" for series in self.series)
        return f"{self.title} over {self.x_name}, up to {count(self.x.high)}: {named}"

    def x_ticks(self) -> list[tuple[str, str]]:
        """Returns the position and label of each horizontal tick."""
        thousands = self.x.high >= 20_000
        labels = [f"{short(tick / 1000)}k" if thousands and tick else count(tick) for tick in self.x.ticks]
        return [(place(self.x.share(tick)), label) for tick, label in zip(self.x.ticks, labels, strict=True)]

    def y_ticks(self) -> list[tuple[str, str]]:
        """Returns the position and label of each vertical tick."""
        labels = self.y.tick_labels(percent=self.percent)
        return [(place(1 - self.y.share(tick)), label) for tick, label in zip(self.y.ticks, labels, strict=True)]

    def x_rules(self) -> list[str]:
        """Returns the positions of the dotted lines."""
        return [place(self.x.share(rule)) for rule in self.rules]

    def line(self, series: Series) -> str:
        """Returns the polyline of a curve, through means if there are too many points."""
        return self._path([(x, mean) for x, _, mean, _ in thin(series.points)])

    def band(self, series: Series) -> str:
        """Returns the polygon between the lowest and highest values of each mean; empty without means."""
        rows = thin(series.points)
        if len(rows) == len(series.points):
            return ""
        return self._path([*((x, high) for x, _, _, high in rows), *((x, low) for x, low, _, _ in reversed(rows))])

    def dots(self, series: Series) -> list[tuple[str, str, str]]:
        """Returns the left, top and tooltip of each point; empty if there are too many."""
        if len(series.points) > MAX_DOTS:
            return []
        unit, write = self.x_name.split()[-1], percent if self.percent else short
        return [
            (place(self.x.share(x)), place(1 - self.y.share(y)), f"{unit} {count(x)}: {write(y)}")
            for x, y in series.points
        ]

    def _path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{_GRID * self.x.share(x):.1f},{_GRID * (1 - self.y.share(y)):.1f}" for x, y in points)


def thin(points: Sequence[Point]) -> list[tuple[float, float, float, float]]:
    """Averages consecutive points to at most `MAX_POINTS` rows (x, lowest, mean, highest)."""
    width = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    return [
        (
            sum(x for x, _ in group) / len(group),
            min(y for _, y in group),
            sum(y for _, y in group) / len(group),
            max(y for _, y in group),
        )
        for group in groups
    ]


@dataclass(frozen=True)
class Bar:
    """A horizontal bar below its name and value.

    Attributes:
        style: The CSS class.
        name: The name.
        value: The value as text.
        start: Start of the bar, from 0 to 1.
        length: Length of the bar, from 0 to 1; None for no bar.
    """

    style: str
    name: str
    value: str
    start: float = 0.0
    length: float | None = None

    @property
    def left(self) -> str:
        """The start as a percentage."""
        return place(self.start)

    @property
    def width(self) -> str:
        """The length as a percentage."""
        return place(self.length or 0.0)
