"""A comparison as an HTML page and as text for the terminal, from the same tables."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from lit_mnist.comparison import tables
from lit_mnist.report.formats import number
from lit_mnist.report.html import write_page
from lit_mnist.report.plot import STYLES, Plot, Point, Series, loss_axis, step_axis
from lit_mnist.report.table import TONES, Cell, Column, Entry, Table, fitting_table, text_list, text_of


def write_comparison(path: Path, comparison: Mapping[str, Any]) -> None:
    """Writes the page of a comparison atomically.

    Args:
        path: The file to write; its folder must exist.
        comparison: The content of `comparison.json`.

    Raises:
        OSError: The file cannot be written.
    """
    cost = tables.cost_table(comparison)
    write_page(
        path,
        "lit_mnist.comparison",
        "comparison.html.jinja",
        comparison=comparison,
        headline=tables.headline(comparison),
        notes=tables.notes(comparison),
        equality=tables.equality_table(comparison),
        marks=tables.MARKS,
        expectations=tables.expectations(comparison),
        differences=tables.differences(comparison),
        loss=_loss_plot(comparison),
        timing=tables.timing(comparison),
        cost=cost,
        measures=tables.measures(cost),
        not_run=tables.not_run(comparison),
    )


def _loss_plot(comparison: Mapping[str, Any]) -> Plot | None:
    """Returns the loss curves; engines with bit-identical losses share a line."""
    groups: dict[tuple[str, ...], tuple[list[str], list[Point]]] = {}
    for engine in tables.finished(comparison):
        points = [(float(step), loss) for step, loss in enumerate(engine["loss"], 1) if math.isfinite(loss)]
        if points:
            # The text of a float is exact, and equal for two NaN.
            groups.setdefault(tuple(map(repr, engine["loss"])), ([], points))[0].append(tables.label(engine))
    if not groups:
        return None
    series = [
        Series(STYLES[n % len(STYLES)], ", ".join(names), number(points[-1][1]), points)
        for n, (names, points) in enumerate(groups.values())
    ]
    y = loss_axis([value for one in series for _, value in one.points])
    unit = "mean over the ranks, cross-entropy in nats" + ", logarithmic" * y.log
    return Plot("Training loss", unit, series, step_axis(max(one.points[-1][0] for one in series)), y)


def text(comparison: Mapping[str, Any], *, width: int | None = None, color: bool | None = None) -> str:
    """Returns the comparison as text for the terminal.

    Args:
        comparison: The content of `comparison.json`.
        width: Number of columns; by default that of the terminal, at most 120.
        color: Whether to use colors; by default if the standard output is a terminal.
    """
    width = width or min(shutil.get_terminal_size((120, 24)).columns, 120)
    big, words, tone = tables.headline(comparison)
    marks = "   ".join(f"{mark.name} {mark.text}" for mark in tables.MARKS)
    cost = tables.cost_table(comparison)
    parts: list[Text | RichTable] = [
        Text(f"{big} {words}", TONES[tone] or "bold"),
        *map(Text, tables.notes(comparison)),
        Text(),
        Text("Equality", "bold"),
        fitting_table(tables.equality_table(comparison), width),
        Text(marks),
        text_list(tables.expectations(comparison)),
        Text(),
        Text.assemble(("Cost", "bold"), f": {tables.timing(comparison)}"),
    ]
    if cost.rows:
        measures = [Entry(entry.name.lower(), entry.text) for entry in tables.measures(cost)]
        parts += [fitting_table(_with_range(cost), width), text_list(measures)]
    others = {"First differences": tables.differences(comparison), "Skipped and failed": tables.not_run(comparison)}
    for title, rows in others.items():
        if rows:
            parts += [Text(), Text(title, "bold"), text_list(rows)]
    return text_of(parts, width, color)


def _with_range(table: Table) -> Table:
    """Moves the range of the speeds, which the page shows below them, to a column."""
    at = next((n for n, column in enumerate(table.columns) if column.head == "images/s"), None)
    if at is None or not any(row[at].below for row in table.rows):
        return table
    columns = [*table.columns[: at + 1], Column("", "from to", "num"), *table.columns[at + 1 :]]
    return Table(columns, [[*row[: at + 1], Cell(row[at].below), *row[at + 1 :]] for row in table.rows])
