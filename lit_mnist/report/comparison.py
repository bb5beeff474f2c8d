"""The comparison of engines as one HTML page: who trained the same, and at what cost.

`write_comparison` reads the content of `comparison.json`; whatever in it is absent or None is an en dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_mnist.report.axes import linear_axis, log_axis, step_axis
from lit_mnist.report.comparison_rows import (
    MARKS,
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
from lit_mnist.report.comparison_verdict import engines, headline, label, notes, part, reference
from lit_mnist.report.curves import Plot, Series, figure
from lit_mnist.report.facts import block, code, configuration, data_rows
from lit_mnist.report.formats import SPACE, count, number, text
from lit_mnist.report.page import frame, one_line, write_page
from lit_mnist.report.style import COMPARISON_STYLE

CURVE_STYLES = 6


def write_comparison(path: Path, comparison: Mapping[str, Any]) -> None:
    """Writes the page of a comparison; a reader sees the old file or the whole new one, never a part.

    Args:
        path: The file to write; its folder must exist.
        comparison: The content of `comparison.json`.

    Raises:
        OSError: The file cannot be written.
    """
    absent = not_run(comparison)
    sections = [
        ("Equal or not", equality(comparison)),
        ("Loss", losses(comparison)),
        ("Cost", cost(comparison)),
        *([("Skipped and failed", page_list(absent))] if absent else []),
        ("The run", origin(comparison)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections)
    big, words, _ = headline(comparison)
    write_page(path, frame(f"{big} {words}", header(comparison) + body, COMPARISON_STYLE))


def header(comparison: Mapping[str, Any]) -> str:
    """Returns the verdict, and in one line what was run."""
    big, words, tone = headline(comparison)
    ranks = comparison.get("world_size")
    ran = [
        f"{count(ranks)}{SPACE}{'rank' if ranks == 1 else 'ranks'}",
        *(text(comparison.get(name)) for name in ("device", "precision")),
        f"{count(comparison.get('steps'))}{SPACE}steps",
        f"compared with {text(comparison.get('reference'))}",
    ]
    net = part(part(comparison, "experiment"), "model").get("net")
    apart = "".join(f"<p class=notes>{text(note)}</p>" for note in notes(comparison))
    return (
        f"<header><p class=over>{text(part(comparison, 'data').get('name'))} · {text(net)}</p>"
        f'<h1 class="{tone}">{big} <span>{words}</span></h1>{apart}{one_line(ran)}</header>'
    )


def equality(comparison: Mapping[str, Any]) -> str:
    """Returns the section that says check by check who is equal, and where the others part from the reference."""
    if not engines(comparison):
        return "<p class=quiet>No engine was asked for.</p>"
    firsts = differences(comparison)
    return (
        page_table("Equal or not", equal_grid(comparison))
        + keys(MARKS)
        + keys(((name, words) for name, words, _ in expectations(comparison)), "apart")
        + (f"<h3 class=first>First differences</h3>{page_list(firsts)}" if firsts else "")
    )


def losses(comparison: Mapping[str, Any]) -> str:
    """Returns the loss curves, one line for all engines whose losses are the same in every bit."""
    groups: dict[tuple[str, ...], tuple[list[str], list[tuple[float, float]]]] = {}
    for engine in sorted(engines(comparison), key=lambda engine: engine is not reference(comparison)):
        logged = engine.get("loss") or []
        line = [(float(step), y) for step, y in enumerate(logged, 1) if y is not None and math.isfinite(y)]
        if line:
            # the text of a float tells every bit, and is equal where both are NaN
            groups.setdefault(tuple(map(repr, logged)), ([], line))[0].append(label(engine))
    if not groups:
        return "<p class=quiet>No losses were logged.</p>"
    series = [
        Series(f"c{n % CURVE_STYLES}", ", ".join(names), number(line[-1][1]), line)
        for n, (names, line) in enumerate(groups.values())
    ]
    heights = [y for one in series for _, y in one.points]
    log = min(heights) > 0 and max(heights) / min(heights) >= 10
    axis = log_axis(heights) if log else linear_axis(heights, least=0.1 * max(map(abs, heights)) or 1.0)
    unit = "mean over the ranks, cross-entropy in nats" + (", logarithmic" if log else "")
    steps = step_axis(max(x for one in series for x, _ in one.points))
    drawn = figure(Plot("Training loss", unit, series, axis, axis.tick_labels()), steps, [])
    note = "Engines with the same loss in every bit of every step share a line; the figure is its last step's."
    return f"{drawn}<p class=quiet>{note}</p>"


def cost(comparison: Mapping[str, Any]) -> str:
    """Returns the section of what each engine takes."""
    grid, how = cost_grid(comparison), timing(comparison)
    if not grid.rows:
        return "<p class=quiet>No engine ran.</p>"
    above = f'<p class="quiet method">{text(how[:1].upper() + how[1:])}.</p>'
    if len(grid.columns) == 1:
        return above
    return above + page_table("Cost", grid) + keys(((name, words) for name, words, _ in counted(grid)), "apart")


def origin(comparison: Mapping[str, Any]) -> str:
    """Returns the section of the facts: how it was run, on what, with which versions and configuration."""
    run = [
        *((name.capitalize(), text(comparison.get(name))) for name in ("reference", "device", "precision")),
        ("Ranks", count(comparison.get("world_size"))),
        ("Threads per rank", count(comparison.get("threads"))),
        ("Steps compared", count(comparison.get("steps"))),
        ("Timing repeats", count(comparison.get("repeats"))),
        ("Warm-up steps", count(comparison.get("warm_up_steps"))),
    ]
    versions = [(name, text(version)) for name, version in part(comparison, "versions").items()]
    rows = [(name, code(comparison.get(name.lower()))) for name in ("Command", "Commit")]
    rows += data_rows(part(comparison, "data"))
    return (
        f"<div class=facts>{block('Settings', run)}{block('Versions', versions)}</div>"
        f"{block('Origin', rows, 'block origin')}{configuration(part(comparison, 'experiment'))}"
    )


def page_table(name: str, grid: Grid, look: str = "cells") -> str:
    """Returns a table that scrolls inside its box."""
    styles = [column.style for column in grid.columns]
    head = "".join(f'<th scope=col class="{column.style}">{text(column.title)}</th>' for column in grid.columns)
    lines = []
    for first, *rest in grid.rows:
        cells = []
        for cell, style in zip(rest, styles[1:], strict=True):
            said = f"<span class=said> {text(cell.said)}</span>" if cell.said else ""
            bar = "" if cell.bar is None else f'<span class=bar><i style="width:{100 * cell.bar:.1f}%"></i></span>'
            below = f"<small>{text(cell.below)}</small>" if cell.below else ""
            cells.append(f'<td class="{style} {cell.tone}">{text(cell.shown)}{said}{bar}{below}</td>')
        engine, bracket, variant = first.shown.partition(" (")
        whole = f" <span class=whole>({text(variant)}</span>" if bracket else ""
        lines.append(f"<tr><th scope=row>{text(engine)}{whole}</th>{''.join(cells)}</tr>")
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{name}"><table class="{look}">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def keys(entries: Iterable[tuple[str, str]], look: str = "") -> str:
    """Returns what marks and words mean, one after the other, or `apart` on lines of their own."""
    items = "".join(f"<span><b>{text(name)}</b> {text(words)}</span>" for name, words in entries)
    return f'<p class="quiet keys {look}">{items}</p>' if items else ""


def page_list(rows: Iterable[Entry]) -> str:
    """Returns names with a sentence and perhaps a command each."""
    items = (
        f"<li><b>{text(name)}</b>{text(words)}{code(command) if command else ''}</li>" for name, words, command in rows
    )
    return f"<ul class=firsts>{''.join(items)}</ul>"
