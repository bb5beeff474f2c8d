"""Scaling over ranks: images per second, efficiency, and bytes sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.pages import Part
from benchmarks.scaling import INDEPENDENT, LOCK_STEP
from lit_mnist.report.formats import MISSING, SPACE, count, number, percent, signed
from lit_mnist.report.plot import STYLES, Axis, Plot, Point, Series, linear_axis
from lit_mnist.report.table import Cell, Column, Table

Row = Mapping[str, Any]

BYTES = (
    "Of the busiest rank. A ring that sums n bytes on N ranks sends 2 (N - 1) / N times n from each; the exchange of "
    "batch norm, and a server, send (N - 1) times n. Payload is what is passed to them. gloo adds 144 bytes to each of "
    "its messages. The rest of what was counted are heartbeats and what TCP had to send twice."
)


def scaling_parts(topic: Row) -> list[Part]:
    """Returns the parts of the section; `topic` is the topic's entry of `bench.json`."""
    found = topic["scaling"]
    points: Sequence[Row] = found["points"]
    limit = found["cores"] / found["threads"]
    beyond = any(row["beyond_cores"] for row in points)
    speeds = _series(points, lambda row: row["images_per_s"], number)
    shares = _series(points, lambda row: row["efficiency"][INDEPENDENT], percent)
    parts = [
        Part("plot", _plot("Throughput", "images/s of all ranks", speeds, limit)),
        Part(
            "plot", _plot("Efficiency", f"compared with as many {INDEPENDENT} processes", shares, limit, percent=True)
        ),
        Part("table", _speed_table(points), "Scaling"),
        Part("heading", "Bytes of a step"),
        Part("method", BYTES),
        Part("table", _traffic_table(found["traffic"]), "Bytes of a step"),
    ]
    if beyond:
        parts.insert(2, Part("note", "Right of the dotted line there are more ranks than cores, which they share."))
    return parts


def _series(points: Sequence[Row], value: Callable[[Row], float], write: Callable[[object], str]) -> list[Series]:
    """Returns a series for each variant, with the value on the largest number of ranks."""
    lines: dict[str, list[Point]] = {}
    for row in points:
        lines.setdefault(row["variant"], []).append((float(row["ranks"]), value(row)))
    return [
        Series(STYLES[n % len(STYLES)], name, write(line[-1][1]), line)
        for n, (name, line) in enumerate((name, sorted(line)) for name, line in lines.items())
    ]


def _plot(title: str, unit: str, series: Sequence[Series], limit: float, *, percent: bool = False) -> Plot:
    """Returns a plot over the ranks, with a dotted line at the largest number of ranks with cores of their own."""
    ticks = sorted({x for one in series for x, _ in one.points})
    x = Axis(ticks[0], ticks[-1] if len(ticks) > 1 else 2 * ticks[0], tuple(ticks), log=True)
    y = linear_axis([0.0, *(y for one in series for _, y in one.points)], least=0.1 if percent else 1.0)
    rules = [limit] if x.low <= limit < x.high else []
    return Plot(title, unit, series, x, y, "ranks", percent, rules)


def _speed_table(points: Sequence[Row]) -> Table:
    bases = (INDEPENDENT, LOCK_STEP)
    titles = ("Ranks", "Images per second", "ms per step", *(f"Compared with {base}" for base in bases))
    rows = [
        [
            Cell(row["variant"]),
            Cell(count(row["ranks"]), below="more than cores" if row["beyond_cores"] else ""),
            *(Cell(number(row[name])) for name in ("images_per_s", "step_ms")),
            *(Cell(percent(row["efficiency"][base])) for base in bases),
        ]
        for row in sorted(points, key=lambda row: row["variant"])
    ]
    return Table([Column("Variant"), *(Column(title, style="num") for title in titles)], rows)


def _traffic_table(traffic: Sequence[Row]) -> Table:
    """Returns what the busiest rank passes to its collectives and sends, as counted and by the formulas."""
    titles = ("Ranks", "Payload", "by formula", "Data sent, by formula", "with gloo's framing", "Sent, counted", "More")
    rows = []
    for row in traffic:
        whole, sent = row["data_formula"] + row["framing_formula"], row["bytes_sent"]
        numbers = (row["ranks"], row["payload_bytes"], row["payload_formula"], row["data_formula"], whole, sent)
        more = MISSING if sent is None else f"{signed(100 * (sent / whole - 1), 1)}{SPACE}%"
        rows.append([Cell(row["engine"]), *(Cell(count(each)) for each in numbers), Cell(more)])
    return Table([Column("Engine"), *(Column(title, style="num") for title in titles)], rows)
