"""Tables and lists that are shown both on pages (by the macros of the templates) and in the terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lit_mnist.distributed.screen import has_color
from lit_mnist.distributed.terminal import escape_control
from lit_mnist.report.formats import MISSING, SPACE

# Widths of a terminal that tables need, and of one that has space between two columns.
_TABLE, _WIDE_TABLE = 100, 120
TONES = {"": "", "bad": "bold red", "muted": "dim"}


class Entry(NamedTuple):
    """A name with its description and, if given, a command to copy."""

    name: str
    text: str
    command: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: The text.
        tone: `bad`, `muted` or nothing.
        hint: Text for screen readers.
        below: A second, smaller line, on the page only.
        bar: Length of a bar from 0 to 1, on the page only.
    """

    text: str
    tone: str = ""
    hint: str = ""
    below: str = ""
    bar: float | None = None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Heading on the page.
        head: Heading in the terminal.
        style: `num`, `parts`, `word`, `mark`, `hash` or nothing.
    """

    title: str
    head: str = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its name."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def without_empty_columns(self) -> Table:
        """Returns the table without columns that have no value."""
        kept = [n for n in range(len(self.columns)) if n == 0 or any(row[n].text != MISSING for row in self.rows)]
        return Table([self.columns[n] for n in kept], [[row[n] for n in kept] for row in self.rows])


def spread_cell(
    spread: Mapping[str, float] | None, write: Callable[[object], str], best: float = 0.0, tone: str = ""
) -> Cell:
    """Returns a cell with a median above its range, and a bar for its share of `best`."""
    if spread is None:
        return Cell(MISSING)
    low, high = write(spread["lowest"]), write(spread["highest"])
    bar = spread["median"] / best if best > 0 else None
    return Cell(write(spread["median"]), tone, below="" if low == high else f"{low} to {high}", bar=bar)


def text_table(table: Table, gap: int = 1) -> RichTable:
    """Returns a table for the terminal; only the row names may wrap."""
    found = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for n, column in enumerate(table.columns):
        place: Any = "right" if "num" in column.style else "center" if column.style == "mark" else "left"
        found.add_column(Text(escape_control(column.head)), justify=place, no_wrap=n > 0, overflow="fold")
    for row in table.rows:
        found.add_row(*(Text(escape_control(cell.text).replace(SPACE, " "), TONES[cell.tone]) for cell in row))
    return found


def fitting_table(table: Table, width: int) -> RichTable:
    """Returns a table for the terminal; one that is too wide becomes a list, in which each value has its name."""
    if width >= _TABLE:
        return text_table(table, gap=1 if width >= _WIDE_TABLE else 0)
    heads = [column.head or column.title for column in table.columns[1:]]
    return text_list(
        Entry(name.text, ", ".join(f"{head} {cell.text}".strip() for head, cell in zip(heads, cells, strict=True)))
        for name, *cells in table.rows
    )


def text_list(entries: Iterable[Entry]) -> RichTable:
    """Returns a list for the terminal, as two columns."""
    found = RichTable.grid(padding=(0, 2, 0, 0))
    found.add_column(max_width=36, overflow="fold")
    found.add_column(overflow="fold")
    for name, text, command in entries:
        found.add_row(Text(escape_control(name)), Text(escape_control(f"{text}\n{command}".rstrip())))
    return found


def text_of(parts: Iterable[Text | RichTable], width: int, color: bool | None = None) -> str:
    """Renders texts and tables for the terminal; empty tables are omitted.

    Args:
        parts: The texts and tables.
        width: Number of columns.
        color: Whether to use colors; by default if the standard output shows them.
    """
    file = io.StringIO()
    color = has_color() if color is None else color
    console = Console(file=file, width=width, force_terminal=color, highlight=False)
    for part in parts:
        if not isinstance(part, RichTable) or part.row_count:
            console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
