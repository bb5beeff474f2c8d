"""Tables and lists for pages and for the terminal, from the same rows. The macros of the templates draw the pages'."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lit_mnist.distributed.terminal import escape_control
from lit_mnist.report.formats import MISSING, SPACE

TONES = {"": "", "bad": "bold red", "muted": "dim"}


class Entry(NamedTuple):
    """A name with a sentence, and a command to copy or nothing."""

    name: str
    text: str
    command: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What both forms show.
        tone: `bad`, `muted` or nothing.
        hint: What a screen reader adds.
        below: A second, smaller line, on the page only.
        bar: The length of a bar, 0 to 1, on the page only.
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
        title: Its heading on the page.
        head: Its heading in the terminal.
        style: `num`, `parts`, `word`, `mark`, `hash` or nothing.
    """

    title: str
    head: str = ""
    style: str = ""


@dataclass(frozen=True)
class Table:
    """Columns, and rows with a cell for each of them; the first cell is the name of the row."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def without_empty_columns(self) -> Table:
        """Returns the table without the columns in which no row has a value."""
        kept = [n for n in range(len(self.columns)) if n == 0 or any(row[n].text != MISSING for row in self.rows)]
        return Table([self.columns[n] for n in kept], [[row[n] for n in kept] for row in self.rows])


def spread_cell(
    spread: Mapping[str, float] | None, write: Callable[[object], str], best: float = 0.0, tone: str = ""
) -> Cell:
    """Returns a median above its range, with a bar for its share of `best`."""
    if spread is None:
        return Cell(MISSING)
    low, high = write(spread["lowest"]), write(spread["highest"])
    bar = spread["median"] / best if best > 0 else None
    return Cell(write(spread["median"]), tone, below="" if low == high else f"{low} to {high}", bar=bar)


def text_table(table: Table, gap: int = 1) -> RichTable:
    """Returns a table for the terminal, in which only the names of the rows may wrap."""
    found = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for n, column in enumerate(table.columns):
        place: Any = "right" if "num" in column.style else "center" if column.style == "mark" else "left"
        found.add_column(Text(escape_control(column.head)), justify=place, no_wrap=n > 0, overflow="fold")
    for row in table.rows:
        found.add_row(*(Text(escape_control(cell.text).replace(SPACE, " "), TONES[cell.tone]) for cell in row))
    return found


def text_list(entries: Iterable[Entry]) -> RichTable:
    """Returns a list for the terminal, with the sentences in one column."""
    found = RichTable.grid(padding=(0, 2, 0, 0))
    found.add_column(max_width=36, overflow="fold")
    found.add_column(overflow="fold")
    for name, text, command in entries:
        found.add_row(Text(escape_control(name)), Text(escape_control(f"{text}\n{command}".rstrip())))
    return found


def text_of(parts: Iterable[Text | RichTable], width: int, color: bool | None = None) -> str:
    """Returns texts and tables as lines for the terminal.

    Args:
        parts: What to print; empty tables are left out.
        width: The number of columns.
        color: Whether to color it; by default if the standard output is a terminal.
    """
    file = io.StringIO()
    color = sys.stdout.isatty() if color is None else color
    console = Console(file=file, width=width, force_terminal=color, highlight=False)
    for part in parts:
        if not isinstance(part, RichTable) or part.row_count:
            console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
