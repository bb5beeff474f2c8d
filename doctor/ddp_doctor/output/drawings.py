"""The drawings of the page: who saw which samples, the difference of each step, the tree of the modules.

Each is as wide as a telephone, so that its text is legible there. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite, log10

from ddp_doctor.findings import Report
from ddp_doctor.observations import Batch, Comparison
from ddp_doctor.output.terminal import plain

WIDTH = 340
_LABEL, _CELL_HEIGHT, _GAP = 52, 20, 3
_CHARACTER = 6.7
_MOST_RANKS = 4
# Exponents of the axis: below is rounding of 64 bits, above nothing is right.
_LEAST, _MOST = -17, 1


@dataclass(frozen=True)
class Text:
    """A text of a drawing."""

    x: float
    y: float
    text: str
    kind: str = ""


@dataclass(frozen=True)
class Cell:
    """A sample in a drawing."""

    x: float
    y: float
    width: float
    text: str
    shared: bool


@dataclass
class Samples:
    """Who saw which samples.

    Attributes:
        title: What it shows, for readers who do not see it.
        height: Its height.
        texts: Labels.
        cells: The samples.
        shared: Whether a sample is outlined.
    """

    title: str
    height: float = 0.0
    texts: list[Text] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    shared: bool = False


def samples_drawing(report: Report) -> Samples | None:
    """Returns the drawing of the first batches of each rank; None if they are not known."""
    batches = [batch for batch in report.batches if batch.rank < _MOST_RANKS]
    if not batches:
        return None
    shared = any(batch.shared for batch in batches)
    others = "ranks share samples of an epoch" if shared else "no rank has a sample of another rank"
    drawing = Samples(f"Samples of each rank in the first steps: {others}.", shared=shared)
    y = 0.0
    for (epoch, step), group in groupby(batches, lambda batch: (batch.epoch, batch.step)):
        y += 16
        drawing.texts.append(Text(0, y, f"epoch {epoch}, step {step}", "muted"))
        y += 7
        for batch in group:
            _add_batch(drawing, batch, y)
            y += _CELL_HEIGHT + _GAP
        y += 4
    drawing.height = y
    return drawing


def _add_batch(drawing: Samples, batch: Batch, y: float) -> None:
    base = y + 14
    drawing.texts.append(Text(0, base, f"rank {batch.rank}"))
    x, shown = float(_LABEL), 0
    for sample in batch.samples:
        text = plain(sample)[:8]
        width = len(text) * _CHARACTER + 8
        rest = f"+{batch.size - shown}"
        # The number of those that have no place must have one.
        if x + width + (len(rest) * _CHARACTER + _GAP) > WIDTH and shown < batch.size - 1:
            break
        drawing.cells.append(Cell(x, y, width, text, sample in batch.shared))
        x += width + _GAP
        shown += 1
    if shown < batch.size:
        drawing.texts.append(Text(x, base, f"+{batch.size - shown}", "muted"))


@dataclass(frozen=True)
class Point:
    """The difference of one step."""

    x: float
    y: float
    step: int
    label: str
    above: bool


@dataclass(frozen=True)
class Curve:
    """The difference of each step from one process, on a logarithmic axis.

    Attributes:
        title: The values, for readers who do not see it.
        points: The steps.
        ticks: Labels of the axis.
        threshold: Height of the threshold, and its label.
    """

    title: str
    points: Sequence[Point]
    ticks: Sequence[Text]
    threshold: Text


_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 330, 12, 150


def curve_drawing(comparison: Comparison | None) -> Curve | None:
    """Returns the drawing of the differences; None without any."""
    if comparison is None or not comparison.differences:
        return None
    values = list(comparison.differences)
    gap = (_RIGHT - _LEFT) / max(len(values), 1)
    points = [
        Point(_LEFT + gap * (step + 0.5), _height(value), step, _number(value), not value <= comparison.threshold)
        for step, value in enumerate(values)
    ]
    ticks = [Text(0, _height(10.0**power), f"1e{power}") for power in range(_LEAST + 1, _MOST + 1, 4)]
    told = ", ".join(f"step {point.step}: {point.label}" for point in points)
    threshold = Text(_RIGHT, _height(comparison.threshold), f"rounding ends here: {comparison.threshold:.0e}")
    return Curve(f"Difference of the gradients from one process. {told}.", points, ticks, threshold)


def _height(value: float) -> float:
    power = _MOST if not isfinite(value) else log10(value) if value > 0 else _LEAST
    share = (min(max(power, _LEAST), _MOST) - _LEAST) / (_MOST - _LEAST)
    return round(_BOTTOM - share * (_BOTTOM - _TOP), 1)


def _number(value: float) -> str:
    return f"{value:.1e}" if isfinite(value) else "not finite"


@dataclass(frozen=True)
class Node:
    """A line of the tree.

    Attributes:
        depth: Its depth.
        name: Its own name.
        kind: Its class; empty for a module that was not called itself.
        state: `equal`, `first` (the first one that differs), `later` or empty.
    """

    depth: int
    name: str
    kind: str = ""
    state: str = ""


# Lines of a tree that one can look at.
_MOST_NODES = 40


def module_tree(comparison: Comparison | None) -> list[Node]:
    """Returns the tree of the modules around the first one that differs; empty if none does."""
    if comparison is None or not comparison.module:
        return []
    names = [name for name, _ in comparison.modules]
    if comparison.module not in names:
        return []
    place = names.index(comparison.module)
    states = {
        name: "equal" if number < place else "first" if number == place else "later"
        for number, name in enumerate(names)
    }
    kinds = dict(comparison.modules)
    ordered: dict[str, None] = {}
    # Of modules that contain the first one, the outputs differ for its sake.
    for name in sorted(names, key=names.index):
        parts = name.split(".")
        ordered.update(dict.fromkeys(".".join(parts[: n + 1]) for n in range(len(parts)) if name))
    tree = _in_order(list(ordered))
    wanted = _near(tree, comparison.module)
    return [
        Node(name.count("."), name.rpartition(".")[2], kinds.get(name, ""), states.get(name, ""))
        if name
        else Node(0, "…")
        for name in wanted
    ]


def _in_order(names: list[str]) -> list[str]:
    """Returns the names with each parent before its parts."""

    def of(parent: str) -> list[str]:
        inside = [name for name in names if name.rpartition(".")[0] == parent]
        return [found for name in inside for found in (name, *of(name))]

    return of("")


def _near(tree: list[str], name: str) -> list[str]:
    """Returns the lines around a module, with an empty one for those that are left out."""
    if len(tree) <= _MOST_NODES:
        return tree
    place = tree.index(name)
    parents = {".".join(name.split(".")[: n + 1]) for n in range(name.count(".") + 1)}
    kept = [n for n, one in enumerate(tree) if one in parents or abs(n - place) <= _MOST_NODES // 3]
    found: list[str] = []
    for before, n in zip([-1, *kept], kept, strict=False):
        found += [""] if n > before + 1 else []
        found.append(tree[n])
    return [*found, *([""] if kept[-1] < len(tree) - 1 else [])]
