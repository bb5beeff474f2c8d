"""The waterfall of one training step: each engine's parts, one below the other, as inline SVG, and side by side.

A part's bar begins where the one above it ends, so that the last one ends where the sum of all is; what is then left
to the step that was measured without any probe is the remainder. Colours come from the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_mnist.profiling.timer import ALL_REDUCE, BACKWARD, BATCH_NORM, COPY, DATA, FORWARD, OPTIMIZER
from lit_mnist.report.comparison import page_table
from lit_mnist.report.comparison_rows import Cell, Column, Grid
from lit_mnist.report.curves import place
from lit_mnist.report.formats import MISSING, SPACE, finite, percent, text

ROW = 36  # pixels of a part: its name, and its bar below
BAR = 9
SUM, REMAINDER, STEP = "sum of the parts", "remainder", "step without probes"
SEPARATE = "step of runs without probes"
HIDDEN = "all-reduce hidden behind the backward pass"
COLOURS = {
    **dict.fromkeys((DATA, COPY, FORWARD, BACKWARD, OPTIMIZER), "var(--train)"),
    **dict.fromkeys((BATCH_NORM, ALL_REDUCE), "var(--valid)"),
}
KINDS = (("var(--train)", "computing"), ("var(--valid)", "communication, waiting"), ("var(--soft)", "all else"))
HOW = (
    "Each part is timed by itself on rank 0, without what it calls of other parts. The step that they are compared "
    "with is that of the steps without any probe, which take turns with the others within each run; the last row is of "
    "runs without any. What is hidden behind computing is not added. All times are the host's, and nothing is "
    "synchronised for them: on a GPU a part is the time that it takes to queue its work, and the computing shows where "
    "the host waits for it."
)


def waterfall_section(topic: Mapping[str, Any]) -> str:
    """Returns the section's content as HTML.

    Args:
        topic: The topic's entry of `bench.json`, whose `waterfall` has for each engine `parts` (each with `name` and
            `ms`), `plain_ms`, `sum_ms`, `remainder_ms`, `covered`, `hidden_all_reduce_ms` and `untraced_ms`. What is
            absent or None is an en dash.
    """
    found = topic.get("waterfall")
    engines = {str(name): one for name, one in found.items() if isinstance(one, Mapping)} if found else {}
    if not engines:
        return "<p class=quiet>No waterfall was measured.</p>"
    ends = [finite(one.get(name)) for one in engines.values() for name in ("sum_ms", "plain_ms")]
    longest = max((end for end in ends if end is not None), default=0.0)
    keys = "".join(f'<span class=key><i style="border-color:{colour}"></i>{words}</span> ' for colour, words in KINDS)
    drawn = "".join(_figure(name, one, longest) for name, one in engines.items())
    return (
        f'<p class="quiet method">{HOW}</p><p class="quiet keys">{keys}</p>'
        f"<div class=facts>{drawn}</div>{page_table('Parts of a step', _grid(engines))}"
    )


def _figure(name: str, engine: Mapping[str, Any], longest: float) -> str:
    """Returns one engine's image."""
    parts, step = _parts(engine), finite(engine.get("plain_ms"))
    covered = finite(engine.get("covered"))
    share = MISSING if covered is None else percent(covered)
    told = f"{_ms(step)} per step; the parts explain {share}"
    rows: list[str] = []
    start = 0.0
    for part, spent in parts:
        rows.append(_row(len(rows), part, spent, start, longest, COLOURS.get(part, "var(--soft)")))
        start += spent or 0.0
    left = finite(engine.get("remainder_ms"))
    rows.append(_row(len(rows), REMAINDER, left, start, longest, "var(--ink)", opacity=0.35))
    rows.append(_row(len(rows), STEP, step, 0.0, longest, "var(--ink)"))
    edge = "" if step is None or not longest else place(step / longest)
    line = f'<line class=rule x1="{edge}" x2="{edge}" y1="0" y2="100%"/>' if edge else ""
    said = f"{name}: {told}. " + ", ".join(f"{part} {_ms(spent)}" for part, spent in parts)
    return (
        f"<figure class=plot><figcaption><h3>{text(name)}</h3> <span class=unit>{told}</span></figcaption>"
        f'<svg role=img aria-label="{text(said)}" width="100%" height="{ROW * len(rows)}">{line}{"".join(rows)}</svg>'
        "</figure>"
    )


def _row(
    number: int, name: str, spent: float | None, start: float, longest: float, colour: str, opacity: float = 1.0
) -> str:
    """Returns a part's name, its time, and its bar, which a negative time turns back from where it starts."""
    top = ROW * number
    words = f'<text x="0" y="{top + 14}">{text(name)}</text><text class=y x="100%" y="{top + 14}">{_ms(spent)}</text>'
    if spent is None or longest <= 0:
        return words
    low = min(max(min(start, start + spent) / longest, 0.0), 1.0)
    width = max(min(abs(spent) / longest, 1.0 - low), 0.001)
    return (
        f'{words}<rect x="{place(low)}" y="{top + 19}" width="{place(width)}" height="{BAR}" rx="2" '
        f'style="fill:{colour};opacity:{opacity:g}"/>'
    )


def _grid(engines: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Returns the engines' parts side by side, and what the last engine spends beyond the first."""
    tables = [dict(_parts(one)) for one in engines.values()]
    names = list(dict.fromkeys(name for table in tables for name in table))
    rows: list[tuple[str, Sequence[float | None]]] = [(name, [table.get(name) for table in tables]) for name in names]
    for name, key in (
        (SUM, "sum_ms"),
        (REMAINDER, "remainder_ms"),
        (STEP, "plain_ms"),
        (HIDDEN, "hidden_all_reduce_ms"),
        (SEPARATE, "untraced_ms"),
    ):
        rows.append((name, [finite(one.get(key)) for one in engines.values()]))
    columns = [Column("ms per step"), *(Column(name, style="figure") for name in engines)]
    several = len(engines) > 1
    if several:
        first, *_, last = engines
        columns.append(Column(f"{last} beyond {first}", style="figure"))
    cells = []
    for name, values in rows:
        beyond = None if values[0] is None or values[-1] is None else values[-1] - values[0]
        shown = [*map(_plain, values), *([_plain(beyond, signed=True)] if several else [])]
        cells.append([Cell(name), *map(Cell, shown)])
    return Grid(columns, cells)


def _parts(engine: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    return [(str(part.get("name")), finite(part.get("ms"))) for part in engine.get("parts") or []]


def _plain(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return MISSING
    # Adding zero takes the sign off a rounded nothing.
    return f"{round(value, 2) + 0.0:{'+' if signed else ''},.2f}".replace("-", "\u2212")


def _ms(value: float | None) -> str:
    return _plain(value) if value is None else f"{_plain(value)}{SPACE}ms"
