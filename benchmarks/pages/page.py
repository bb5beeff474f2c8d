"""The benchmark as one HTML page and as tables for the terminal, from the content of `bench.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.pages import Part
from benchmarks.pages.devices import devices_parts, devices_table, subject
from benchmarks.pages.growth import growth_parts
from benchmarks.pages.waterfall import waterfall_parts
from lit_mnist.report.formats import MISSING, SPACE, count, duration, number, percent, plural, size
from lit_mnist.report.html import write_page
from lit_mnist.report.table import Cell, Column, Table, text_of, text_table

Section = Mapping[str, Any]
Format = Callable[[object], str]


def _with_unit(unit: str, write: Format = number, scale: float = 1.0) -> Format:
    return lambda value: f"{write(value / scale)}{unit}" if isinstance(value, int | float) else MISSING


FORMATS: dict[str, Format] = {
    "images/s": _with_unit(f"{SPACE}images/s", count),
    "s": duration,
    "ms": _with_unit(f"{SPACE}ms", lambda value: number(value, 3)),
    "bytes": size,
    "bytes/s": _with_unit("/s", size),
}
OTHERS: dict[str, tuple[str, Format]] = {
    "accuracy": ("test accuracy", percent),
    "memory_bytes": ("peak memory", size),
    "elsewhere": ("cores used by others", percent),
    "operations_per_s": ("operations", _with_unit(f"{SPACE}TFLOP/s", lambda value: number(value, 3), 1e12)),
}


def write_bench(path: Path, bench: Section) -> None:
    """Writes the page of a benchmark atomically.

    Raises:
        OSError: The file cannot be written.
    """
    write_page(
        path,
        "benchmarks.pages",
        "bench.html.jinja",
        bench=bench,
        headline=headline(bench),
        machine=_machine(bench),
        sections=[(topic["title"], topic_parts(topic)) for topic in bench["topics"].values()],
    )


def topic_parts(topic: Section) -> list[Part]:
    """Returns the parts of a topic's section."""
    parts = [
        part
        for name, make in (("waterfall", waterfall_parts), ("devices", devices_parts), ("growth", growth_parts))
        if name in topic
        for part in make(topic)
    ]
    parts.append(Part("table", _measurements(topic), "Measurements"))
    if topic["ratios"]:
        parts.append(Part("table", _ratios(topic), "Ratios"))
    return [*parts, *(Part("note", note) for note in (*left_out(topic), *topic["notes"]))]


def text(bench: Section) -> str:
    """Returns the benchmark for the terminal."""
    parts: list[Text | RichTable] = []
    for topic in bench["topics"].values():
        parts += [Text(topic["title"], "bold")]
        if "devices" in topic:
            parts += [Text(subject(topic["devices"])), *map(Text, topic["notes"]), text_table(devices_table(topic))]
        parts += [text_table(_measurements(topic)), text_table(_ratios(topic))]
        parts += [*map(Text, left_out(topic)), Text()]
    return text_of([*parts, Text(headline(bench), "bold")], 120)


def headline(bench: Section) -> str:
    """Returns how many of the required ratios were reached."""
    met = [ratio["met"] for topic in bench["topics"].values() for ratio in topic["ratios"] if ratio["met"] is not None]
    return f"{sum(met)} of {len(met)} ratios as required" if met else "Measured"


def left_out(topic: Section) -> list[str]:
    """Returns the measurements of a topic that failed, and why."""
    return [f"Not measured: {each['name']}. {each['reason']}" for each in topic.get("left_out", ())]


def _measurements(topic: Section) -> Table:
    rows: Sequence[Section] = topic["rows"]
    others = [name for name in OTHERS if any(name in row["others"] for row in rows)]
    columns = [
        Column("Measured", "measured"),
        Column("Median", "median", "num"),
        Column("From, to", "from to", "num"),
        Column("Runs", "runs", "num"),
        *(Column(OTHERS[name][0].capitalize(), OTHERS[name][0], "num") for name in others),
    ]
    cells = []
    for row in rows:
        write = FORMATS[row["unit"]]
        longest = max(each["median"] for each in rows if each["unit"] == row["unit"])
        cells.append(
            [
                Cell(row["name"]),
                Cell(write(row["median"]), bar=row["median"] / longest if longest > 0 else None),
                Cell(f"{write(row['lowest'])} to {write(row['highest'])}", "muted"),
                Cell(count(len(row["runs"])), "muted"),
                *(Cell(OTHERS[name][1](row["others"].get(name))) for name in others),
            ]
        )
    return Table(columns, cells)


def _ratios(topic: Section) -> Table:
    columns = [
        Column("Ratio", "ratio"),
        Column("Median", "median", "num"),
        Column("From, to", "from to", "num"),
        Column("Required", "required", "num"),
        Column("", "", "mark"),
    ]
    marks = {None: Cell(MISSING), True: Cell("✓", hint="met"), False: Cell("✗", "bad", "not met")}
    rows = []
    for ratio in topic["ratios"]:
        required = MISSING
        for key, words in (("at_least", "at least"), ("at_most", "at most")):
            if ratio[key] is not None:
                required = f"{words} {number(ratio[key], 3)}"
        median, low, high = (number(ratio[name], 3) for name in ("median", "lowest", "highest"))
        name, range_ = f"{ratio['of']} / {ratio['to']}", f"{low} to {high}"
        rows.append([Cell(name), Cell(median), Cell(range_, "muted"), Cell(required), marks[ratio["met"]]])
    return Table(columns, rows)


def _machine(bench: Section) -> list[str]:
    machine = bench["machine"]
    rounds = sorted({topic["repeats"] for topic in bench["topics"].values()} or {bench["repeats"]})
    times = " to ".join(dict.fromkeys((count(rounds[0]), count(rounds[-1]))))
    measured = f"medians of {times} interleaved round{'s' * (rounds[-1] != 1)}"
    return [machine["processor"], plural(machine["cores"], "core"), *machine.get("gpus", ()), measured]
