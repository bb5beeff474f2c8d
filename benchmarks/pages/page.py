"""The bench as one HTML page and as tables for the terminal: what was measured, and what of it was asked for.

Both read the content of `bench.json`; whatever in it is absent or None is an en dash.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.pages.devices import devices_grid, devices_section, subject
from benchmarks.pages.scaling import scaling_section
from benchmarks.pages.waterfall import waterfall_section
from lit_mnist.report.comparison import page_table
from lit_mnist.report.comparison_rows import Cell, Column, Grid
from lit_mnist.report.comparison_text import text_table
from lit_mnist.report.facts import block, code
from lit_mnist.report.formats import MISSING, SPACE, count, duration, number, percent, size, text
from lit_mnist.report.page import frame, one_line, write_page
from lit_mnist.report.style import COMPARISON_STYLE

Section = Mapping[str, Any]
_WRITTEN: dict[str, Callable[[float | None], str]] = {
    "images/s": count,
    "s": duration,
    "ms": lambda value: MISSING if value is None else f"{number(value, 3)}{SPACE}ms",
    "bytes": size,
    "bytes/s": lambda value: MISSING if value is None else f"{size(value)}/s",
}
_OTHERS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "accuracy": ("test accuracy", percent),
    "memory_bytes": ("peak memory", size),
    "elsewhere": ("cores busy elsewhere", percent),
    "operations_per_s": (
        "operations",
        lambda value: MISSING if value is None else f"{number(value / 1e12, 3)}{SPACE}TFLOP/s",
    ),
}
_OWN = {"waterfall": waterfall_section, "scaling": scaling_section, "devices": devices_section}


def write_bench(path: Path, bench: Section) -> None:
    """Writes the page of a bench; a reader sees the old file or the whole new one, never a part.

    Raises:
        OSError: The file cannot be written.
    """
    topics = bench["topics"]
    body = "".join(
        f"<section><h2>{text(topic['title'])}</h2>{_section(name, topic)}</section>" for name, topic in topics.items()
    )
    body += f"<section><h2>The run</h2>{_origin(bench)}</section>"
    words = headline(bench)
    write_page(
        path, frame(text(words), f"<header><h1>{text(words)}</h1>{_machine(bench)}</header>{body}", COMPARISON_STYLE)
    )


def table(bench: Section) -> str:
    """Returns the bench for the terminal."""
    parts: list[Text | Table] = []
    for topic in bench["topics"].values():
        parts += [Text(topic["title"], "bold")]
        if "devices" in topic:
            parts += [Text(subject(topic["devices"])), *map(Text, topic["notes"]), text_table(devices_grid(topic), 1)]
        parts += [text_table(_rows(topic), 1)]
        if topic["ratios"]:
            parts += [text_table(_ratios(topic), 1)]
        parts += [*map(Text, left_out(topic)), Text()]
    parts += [Text(headline(bench), "bold")]
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=sys.stdout.isatty(), highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def headline(bench: Section) -> str:
    """Returns how many of the ratios asked for were met."""
    met = [ratio["met"] for topic in bench["topics"].values() for ratio in topic["ratios"] if ratio["met"] is not None]
    if not met:
        return "Measured"
    return f"{sum(met)} of {len(met)} ratios as asked for"


def left_out(topic: Section) -> list[str]:
    """Returns what of a topic was not measured, and why."""
    return [f"Not measured: {each['name']}. {each['reason']}" for each in topic.get("left_out", ())]


def _section(name: str, topic: Section) -> str:
    own = _OWN[name](topic) if name in _OWN else ""
    ratios = page_table("Ratios", _ratios(topic)) if topic["ratios"] else ""
    notes = "".join(f"<p class=quiet>{text(note)}</p>" for note in (*left_out(topic), *topic["notes"]))
    return f"{own}{page_table('Measurements', _rows(topic))}{ratios}{notes}"


def _rows(topic: Section) -> Grid:
    rows: Sequence[Section] = topic["rows"]
    longest: dict[str, float] = {}
    for row in rows:
        longest[row["unit"]] = max(longest.get(row["unit"], 0.0), row["median"])
    others = [name for name in _OTHERS if any(name in row["others"] for row in rows)]
    columns = [
        Column("Measured", "measured"),
        Column("Median", "median", "figure"),
        Column("From, to", "from to", "figure"),
        Column("Runs", "runs", "figure"),
        *(Column(_OTHERS[name][0].capitalize(), _OTHERS[name][0], "figure") for name in others),
    ]
    cells = []
    for row in rows:
        write = _WRITTEN[row["unit"]]
        unit = f"{SPACE}{row['unit']}" if row["unit"] == "images/s" else ""
        bar = row["median"] / longest[row["unit"]] if longest[row["unit"]] > 0 else None
        cells.append(
            [
                Cell(row["name"]),
                Cell(write(row["median"]) + unit, bar=bar),
                Cell(f"{write(row['lowest'])} to {write(row['highest'])}", "soft"),
                Cell(count(len(row["runs"])), "soft"),
                *(Cell(_OTHERS[name][1](row["others"].get(name))) for name in others),
            ]
        )
    return Grid(columns, cells)


def _ratios(topic: Section) -> Grid:
    columns = [
        Column("Ratio", "ratio"),
        Column("Median", "median", "figure"),
        Column("From, to", "from to", "figure"),
        Column("Asked for", "asked for", "figure"),
        Column("", "", "mark"),
    ]
    return Grid(columns, [_ratio(ratio) for ratio in topic["ratios"]])


def _ratio(ratio: Section) -> list[Cell]:
    asked = MISSING
    if ratio["at_least"] is not None:
        asked = f"at least {number(ratio['at_least'], 3)}"
    elif ratio["at_most"] is not None:
        asked = f"at most {number(ratio['at_most'], 3)}"
    mark = {None: Cell(MISSING), True: Cell("✓", said="met"), False: Cell("✗", "bad", said="missed")}[ratio["met"]]
    return [
        Cell(f"{ratio['of']} / {ratio['to']}"),
        Cell(number(ratio["median"], 3)),
        Cell(f"{number(ratio['lowest'], 3)} to {number(ratio['highest'], 3)}", "soft"),
        Cell(asked),
        mark,
    ]


def _machine(bench: Section) -> str:
    machine = bench["machine"]
    parts = [text(machine["processor"]), f"{count(machine['cores'])} cores", *map(text, machine.get("gpus", ()))]
    rounds = sorted({topic["repeats"] for topic in bench["topics"].values()} or {bench["repeats"]})
    times = " to ".join(dict.fromkeys((count(rounds[0]), count(rounds[-1]))))
    return one_line([*parts, f"medians of {times} interleaved round{'s' * (rounds[-1] != 1)}"])


def _origin(bench: Section) -> str:
    versions = [(name, text(version)) for name, version in bench["versions"].items()]
    rows = [(name, code(bench.get(name.lower()))) for name in ("Command", "Commit")]
    return f"<div class=facts>{block('Versions', versions)}</div>{block('Origin', rows, 'block origin')}"
