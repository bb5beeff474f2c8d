"""The waterfall of one training step: the parts of each engine as bars, one below the other, and side by side.

A bar begins where the one above it ends, so that the last one ends at the sum of all. The remainder is the difference
to the step that was measured without any probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.pages import Part
from lit_mnist.profiling.timer import ALL_REDUCE, BACKWARD, BATCH_NORM, COPY, DATA, FORWARD, OPTIMIZER
from lit_mnist.report.formats import MISSING, SPACE, percent, signed
from lit_mnist.report.plot import Bar, place
from lit_mnist.report.table import Cell, Column, Table

Engine = Mapping[str, Any]

REMAINDER, STEP = "remainder", "step without probes"
TOTALS = {
    "sum of the parts": "sum_ms",
    REMAINDER: "remainder_ms",
    STEP: "plain_ms",
    "all-reduce that overlaps with the backward pass": "hidden_all_reduce_ms",
    "step of runs without probes": "untraced_ms",
}
STYLES = {
    **dict.fromkeys((DATA, COPY, FORWARD, BACKWARD, OPTIMIZER), "c0"),
    **dict.fromkeys((BATCH_NORM, ALL_REDUCE), "c1"),
}
LEGEND = (("c0", "computing"), ("c1", "communication, waiting"), ("rate", "everything else"))
METHOD = (
    "Each part is timed on rank 0, without the other parts that it calls. The step that they are compared with is that "
    "of the steps without any probe, which alternate with the others within each run; the last row is of runs without "
    "any probe. What overlaps with computing is not added. All times are those of the host, and nothing is "
    "synchronized: on a GPU a part is the time to queue its work, and computing includes the time in which the host "
    "waits."
)


def waterfall_parts(topic: Mapping[str, Any]) -> list[Part]:
    """Returns the parts of the section; `topic` is the topic's entry of `bench.json`."""
    engines: Mapping[str, Engine] = topic["waterfall"]
    longest = max(engine[name] or 0.0 for engine in engines.values() for name in ("sum_ms", "plain_ms"))
    drawn = [_drawing(name, engine, longest) for name, engine in engines.items()]
    return [
        Part("method", METHOD),
        Part("waterfall", drawn, LEGEND),
        Part("table", _table(engines), "Parts of a step"),
    ]


def _drawing(name: str, engine: Engine, longest: float) -> dict[str, Any]:
    """Returns the bars of one engine with their title."""
    bars: list[Bar] = []
    start, step = 0.0, engine["plain_ms"]
    for part, spent in _parts(engine).items():
        bars.append(_bar(STYLES.get(part, "rate"), part, spent, start, longest))
        start += spent or 0.0
    bars.append(_bar("rest part", REMAINDER, engine["remainder_ms"], start, longest))
    bars.append(_bar("rest", STEP, step, 0.0, longest))
    unit = f"{_ms(step)} per step; the parts explain {percent(engine['covered'])}"
    summary = f"{name}: {unit}. " + ", ".join(f"{bar.name} {bar.value}" for bar in bars)
    edge = place(step / longest) if step and longest else ""
    return {"title": name, "unit": unit, "summary": summary, "bars": bars, "edge": edge}


def _bar(style: str, name: str, spent: float | None, start: float, longest: float) -> Bar:
    """Returns a bar; a negative time extends to the left."""
    if spent is None or longest <= 0:
        return Bar(style, name, _ms(spent))
    low = min(max(min(start, start + spent) / longest, 0.0), 1.0)
    return Bar(style, name, _ms(spent), low, max(min(abs(spent) / longest, 1.0 - low), 0.001))


def _table(engines: Mapping[str, Engine]) -> Table:
    """Returns the parts of the engines side by side, and the difference of the last engine and the first."""
    columns = [{**_parts(one), **{name: one[key] for name, key in TOTALS.items()}} for one in engines.values()]
    rows = []
    for name in columns[0]:
        values = [column[name] for column in columns]
        known = values[0] is not None and values[-1] is not None
        more = signed(values[-1] - values[0]) if known else MISSING
        rows.append([Cell(name), *(Cell(_ms(value, "")) for value in values), Cell(more)])
    first, *_, last = engines
    titles = [*engines, f"{last} beyond {first}"]
    return Table([Column("ms per step"), *(Column(title, style="num") for title in titles)], rows)


def _parts(engine: Engine) -> dict[str, float | None]:
    return {part["name"]: part["ms"] for part in engine["parts"]}


def _ms(value: float | None, unit: str = f"{SPACE}ms") -> str:
    return MISSING if value is None else f"{round(value, 2) + 0.0:,.2f}{unit}".replace("-", "\u2212")
