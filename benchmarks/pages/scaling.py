"""Scaling over ranks: images per second, efficiency, a fitted step time with its prediction, and bytes sent.

What is predicted is called so; what was measured are dots. Colours come from the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_mnist.report.axes import Axis, linear_axis, log_axis
from lit_mnist.report.comparison import CURVE_STYLES, page_table
from lit_mnist.report.comparison_rows import Cell, Column, Grid
from lit_mnist.report.comparison_verdict import mappings, part, plain
from lit_mnist.report.curves import GRID, Point, Series, path, place
from lit_mnist.report.formats import MISSING, SPACE, count, finite, number, percent, text

BASES = ("independent", "lock-step")
DRAWN, SERVER_ON = "raw_ddp", "10 Gb/s Ethernet"
MODEL = (
    "A step takes the computing of its samples, the waiting of ranks that do not end together, and for what they share "
    "so much per round and so much per byte. These coefficients are fitted to the measured steps, none below zero: one "
    "of 0 was lost in the noise. A prediction gives each rank cores of its own, adds a network's latency for each "
    "time that a rank must wait for a message (what comes from many at once waits once) and its bandwidth for each "
    "byte, and hides nothing behind the backward pass. It takes this machine's waiting, and rings of any length, for "
    "granted."
)
BYTES = (
    "Of the busiest rank. A ring that sums up n bytes on N ranks sends 2 (N - 1) / N times n from each; batch norm's "
    "exchange, and a server, send (N - 1) times n. Payload is what is handed to them. gloo's framing is 144 bytes for "
    "each of its messages. What was counted beyond that are heartbeats, and what TCP had to send twice."
)
TESTED = {
    "error": "of the fit",
    "without_point": "of a point by a model fitted without it",
    "without_ranks": "of a point by a model fitted without all points on as many ranks",
}


def scaling_section(topic: Mapping[str, Any]) -> str:
    """Returns the section's content as HTML.

    Args:
        topic: The topic's entry of `bench.json`, whose `scaling` has `cores`, `threads`, `points`, `traffic` and
            `model`. What is absent or None is not drawn, and an en dash in the tables.
    """
    found = part(topic, "scaling")
    points = mappings(found.get("points"))
    if not points:
        return "<p class=quiet>No scaling was measured.</p>"
    cores, threads = finite(found.get("cores")), finite(found.get("threads"))
    edge = cores / threads if cores and threads else None
    lines = _lines(points, ("images_per_s",)), _lines(points, ("efficiency", BASES[0]))
    return (
        _figure("Throughput", "images/s of all ranks", lines[0], lines[0], edge)
        + _figure("Efficiency", f"against as many {BASES[0]} processes", lines[1], lines[1], edge, share=True)
        + _beyond(points, edge)
        + page_table("Scaling", _speed_grid(points))
        + f"<h3 class=first>Model of a step</h3>{_model(part(found, 'model'), edge)}"
        + f"<h3 class=first>Bytes of a step</h3>{_traffic(mappings(found.get('traffic')))}"
    )


def _model(model: Mapping[str, Any], edge: float | None) -> str:
    """Returns the fitted model: what it was fitted to, how well, and what it predicts."""
    points = mappings(model.get("points"))
    if not points:
        return f"<p class=quiet>No model was fitted: {text(model.get('refused'))}</p>"
    errors = {words: part(part(model, "errors"), name) for name, words in TESTED.items()}
    size = {
        words: [percent(finite(each.get(name))) for name in ("median", "largest")] for words, each in errors.items()
    }
    told = [f"{median} {words} (largest {largest})" for words, (median, largest) in size.items()]
    here = [row for row in points if row.get("variant") == DRAWN]
    dots = [Series("c0", f"{DRAWN}, measured here", "", _line(here, ("measured_ms",)))]
    times = [Series("c0", f"{DRAWN}, fitted on this machine's cores", "", _line(here, ("predicted_ms",)))]
    shares: list[Series] = []
    for row in mappings(model.get("predictions")):
        if row.get("variant") != DRAWN and row.get("network") != SERVER_ON:
            continue
        name = f"{plain(row.get('variant'))}, {plain(row.get('network'))}, predicted"
        for lines, key, write in ((times, "step_ms", number), (shares, "efficiency", percent)):
            if line := _line(mappings(row.get("points")), (key,)):
                lines.append(Series(f"c{1 + len(shares) % (CURVE_STYLES - 1)}", name, write(line[-1][1]), line))
    return (
        f'<p class="quiet method">{MODEL}</p><p class="quiet method">Median error: {"; ".join(told)}. '
        f"{_coefficients(part(model, 'coefficients'))} {_networks(mappings(model.get('predictions')))}</p>"
        + _figure("Step time, prediction", "ms, logarithmic; the dots are measured", times, dots, edge, log=True)
        + _figure("Efficiency, prediction", "share of a step in which a rank computes", shares, (), None, share=True)
        + page_table("Model and measurement", _fit_grid(points))
    )


def _coefficients(found: Mapping[str, Any]) -> str:
    values = {f"a sample of the {loop}": seconds for loop, seconds in part(found, "compute").items()}
    values |= {"waiting": found.get("wait"), "a round": found.get("per_round"), "a byte": found.get("per_byte")}
    told = (f"{text(name)} {_in('µs', finite(seconds), 1e6)}" for name, seconds in values.items())
    return f"Coefficients: {', '.join(told)}."


def _networks(predictions: Sequence[Mapping[str, Any]]) -> str:
    told = dict.fromkeys(
        f"{text(row.get('network'))}: {_in('µs', finite(row.get('latency_s')), 1e6)}, "
        f"{_in('MB/s', finite(row.get('bandwidth_bytes_per_s')), 1e-6)}"
        for row in predictions
    )
    return f"Latency and bandwidth, assumed: {'; '.join(told)}." if told else ""


def _speed_grid(points: Sequence[Mapping[str, Any]]) -> Grid:
    columns = [
        Column("Variant"),
        *(Column(title, style="figure") for title in ("Ranks", "Images per second", "ms per step")),
        *(Column(f"Against {base}", style="figure") for base in BASES),
    ]
    rows = []
    for row in sorted(points, key=lambda row: str(row.get("variant"))):
        ranks = Cell(count(finite(row.get("ranks"))), below="more than cores" if row.get("beyond_cores") else "")
        shown = [number(finite(row.get(name))) for name in ("images_per_s", "step_ms")]
        shown += [percent(finite(part(row, "efficiency").get(base))) for base in BASES]
        rows.append([Cell(plain(row.get("variant"))), ranks, *map(Cell, shown)])
    return Grid(columns, rows)


def _fit_grid(points: Sequence[Mapping[str, Any]]) -> Grid:
    titles = ("Ranks", "Measured ms", "Model ms", "Error", "Fitted without it", "Without as many ranks")
    rows = [
        [
            Cell(plain(row.get("variant"))),
            Cell(count(finite(row.get("ranks")))),
            *(Cell(number(finite(row.get(name)))) for name in ("measured_ms", "predicted_ms")),
            *(Cell(_signed(finite(row.get(name)))) for name in TESTED),
        ]
        for row in points
    ]
    return Grid([Column("Variant"), *(Column(title, style="figure") for title in titles)], rows)


def _traffic(traffic: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the busiest rank hands to its collectives and sends, counted and by the formulas."""
    if not traffic:
        return "<p class=quiet>No bytes were counted.</p>"
    titles = ("Ranks", "Payload", "by formula", "Data sent, by formula", "with gloo's framing", "Sent, counted", "More")
    rows = []
    for row in traffic:
        data, framing, sent = (finite(row.get(name)) for name in ("data_formula", "framing_formula", "bytes_sent"))
        whole = None if data is None or framing is None else data + framing
        more = sent / whole - 1 if sent is not None and whole else None
        payload = [finite(row.get(name)) for name in ("payload_bytes", "payload_formula")]
        shown = [count(each) for each in (finite(row.get("ranks")), *payload, data, whole, sent)]
        rows.append([Cell(plain(row.get("engine"))), *map(Cell, [*shown, _signed(more)])])
    table = Grid([Column("Engine"), *(Column(title, style="figure") for title in titles)], rows)
    return f'<p class="quiet method">{BYTES}</p>{page_table("Bytes of a step", table)}'


def _figure(
    title: str,
    unit: str,
    lines: Sequence[Series],
    dots: Sequence[Series],
    edge: float | None,
    *,
    share: bool = False,
    log: bool = False,
) -> str:
    """Returns a image over the ranks, or nothing where there is none; from `edge` ranks on they share cores."""
    points = [point for one in (*lines, *dots) for point in one.points]
    if not points:
        return ""
    lines, dots = ([one for one in series if one.points] for series in (lines, dots))
    places = sorted({x for x, _ in points})
    ranks = Axis(places[0], places[-1] if len(places) > 1 else 2 * places[0], tuple(places), log=True)
    heights = [y for _, y in points]
    is_log = log and 0 < min(heights) < max(heights)
    axis = log_axis(heights) if is_log else linear_axis([0.0, *heights], least=0.1 if share else 1.0)
    drawn = _grid(ranks, axis, edge, share=share)
    for one in lines:
        box = f'viewBox="0 0 {GRID} {GRID}" preserveAspectRatio="none" width="100%" height="100%"'
        drawn += f'<svg {box}><polyline class="line {one.style}" points="{path(one.points, ranks, axis)}"/></svg>'
    for one in dots:
        for x, y in one.points:
            spot = f'cx="{place(ranks.share(x))}" cy="{place(1 - axis.share(y))}" r="3.5"'
            told = f"{text(one.name)}, {count(x)}: {percent(y) if share else number(y)}"
            drawn += f'<circle class="dot {one.style}" {spot}><title>{told}</title></circle>'
    named = dict.fromkeys((one.style, one.name, one.value) for one in (*lines, *dots))
    keys = "".join(
        f'<span class="key {style}"><i></i>{text(name)} <b>{text(value)}</b></span>' for style, name, value in named
    )
    summary = f"{title} over ranks: " + ", ".join(f"{name} {value}" for _, name, value in named)
    return (
        f"<figure class=plot><figcaption><h3>{title}</h3> <span class=unit>{unit}</span>"
        f'<span class=legend>{keys}</span></figcaption><div class="frame tall"><svg role=img '
        f'aria-label="{text(summary)}" width="100%" height="100%">{drawn}</svg></div></figure>'
    )


def _beyond(points: Sequence[Mapping[str, Any]], edge: float | None) -> str:
    """Returns what the dotted line means, where the ranks reach beyond it."""
    measured = [ranks for row in points if (ranks := finite(row.get("ranks"))) is not None]
    if edge is None or not measured or not min(measured) <= edge < max(measured):
        return ""
    return '<p class="quiet keys">Right of the dotted line ranks are more than the cores, and share them.</p>'


def _grid(ranks: Axis, axis: Axis, edge: float | None, *, share: bool) -> str:
    """Returns rules and labels of both axes, and the dotted line where the cores are full."""
    drawn = '<text class=name x="100%" y="100%" dy="3.1em">ranks</text>'
    for tick, label in zip(axis.ticks, axis.tick_labels(percent=share), strict=True):
        y = place(1 - axis.share(tick))
        drawn += f'<line class=rule x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        drawn += f'<text class=y x="0" y="{y}" dx="-10" dy=".35em">{label}</text>'
    if edge is not None and ranks.low <= edge < ranks.high:
        x = place(ranks.share(edge))
        drawn += f'<line class=epoch x1="{x}" x2="{x}" y1="0" y2="100%"/>'
    for tick in ranks.ticks:
        drawn += f'<text class=x x="{place(ranks.share(tick))}" y="100%" dy="1.7em">{count(tick)}</text>'
    return drawn


def _lines(points: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Series]:
    """Returns a series for each variant, with the value on the most ranks."""
    write = percent if len(keys) > 1 else number
    series = []
    for n, name in enumerate(dict.fromkeys(plain(row.get("variant")) for row in points)):
        if line := _line([row for row in points if plain(row.get("variant")) == name], keys):
            series.append(Series(f"c{n % CURVE_STYLES}", name, write(line[-1][1]), line))
    return series


def _line(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Point]:
    """Returns what was measured over the ranks, by the keys that lead to it."""
    line = []
    for row in rows:
        *outer, last = keys
        y = finite((part(row, outer[0]) if outer else row).get(last))
        x = finite(row.get("ranks"))
        if x is not None and x >= 1 and y is not None:
            line.append((x, y))
    return sorted(line)


def _in(unit: str, value: float | None, factor: float = 1.0) -> str:
    return MISSING if value is None else f"{number(factor * value)}{SPACE}{unit}"


def _signed(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:+.1f}{SPACE}%".replace("-", "\u2212")
