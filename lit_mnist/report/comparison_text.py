"""The comparison of engines as tables for the terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_mnist.report.comparison_rows import (
    MARKS,
    Cell,
    Column,
    Entry,
    Grid,
    cost_grid,
    counted,
    differences,
    equal_grid,
    expectations,
    not_run,
    timing,
)
from lit_mnist.report.comparison_verdict import headline, notes
from lit_mnist.report.formats import SPACE

TONES = {"": "", "bad": "bold red", "soft": "dim"}


def table(comparison: Mapping[str, Any], *, width: int | None = None, colour: bool | None = None) -> str:
    """Returns the comparison for the terminal: the verdict, both tables, the first differences, what was not run.

    Args:
        comparison: The content of `comparison.json`.
        width: The most columns to fill; by default the terminal's, but at least 100 and at most 120.
        colour: Whether to colour it; by default where the standard output is a terminal.
    """
    width = width or min(max(shutil.get_terminal_size((120, 24)).columns, 100), 120)
    colour = sys.stdout.isatty() if colour is None else colour
    gap = 1 if width >= 120 else 0  # beside the one column between two
    big, words, tone = headline(comparison)
    marks = "   ".join(f"{glyph} {meaning}" for glyph, meaning in MARKS)
    costs = cost_grid(comparison)
    parts: list[Text | Table] = [Text(f"{big} {words}", TONES[tone] or "bold"), *map(Text, notes(comparison))]
    parts += [Text(), Text("Equal or not", "bold"), text_table(equal_grid(comparison), gap), Text(marks)]
    parts += [text_list(expectations(comparison))]
    parts += [Text(), Text.assemble(("Cost", "bold"), f": {timing(comparison)}")]
    if len(costs.columns) > 1:
        meanings = [(name.lower(), words, "") for name, words, _ in counted(costs)]
        parts += [text_table(with_range(costs), gap), text_list(meanings)]
    for title, rows in (("First differences", differences(comparison)), ("Skipped and failed", not_run(comparison))):
        if rows:
            parts += [Text(), Text(title, "bold"), text_list(rows)]
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colour, highlight=False)
    for each in parts:
        if not isinstance(each, Table) or each.row_count:
            console.print(each)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def with_range(grid: Grid) -> Grid:
    """Returns the table with the range of the speeds, which the page writes below them, in a column of its own."""
    at = next((n for n, column in enumerate(grid.columns) if column.head == "images/s"), None)
    if at is None or not any(row[at].below for row in grid.rows):
        return grid
    columns = [*grid.columns[: at + 1], Column("", "from to", "figure"), *grid.columns[at + 1 :]]
    return Grid(columns, [[*row[: at + 1], Cell(row[at].below), *row[at + 1 :]] for row in grid.rows])


def text_table(grid: Grid, gap: int) -> Table:
    """Returns a table in which only the rows' names may be broken."""
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for n, column in enumerate(grid.columns):
        place: Any = "right" if "figure" in column.style else "center" if column.style == "mark" else "left"
        found.add_column(Text(column.head), justify=place, no_wrap=n > 0, overflow="fold")
    for row in grid.rows:
        found.add_row(*(Text(cell.shown.replace(SPACE, " "), TONES[cell.tone]) for cell in row))
    return found


def text_list(rows: Iterable[Entry]) -> Table:
    """Returns names with a sentence and perhaps a command each, the sentences in one column."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(max_width=36, overflow="fold")
    found.add_column(overflow="fold")
    for name, words, command in rows:
        found.add_row(Text(name), Text(f"{words}\n{command}".rstrip()))
    return found
