"""The comparison of engines, as one HTML page and as tables for the terminal: who trained the same, and at what cost.

`write_comparison` and `table` read the content of `comparison.json`; whatever in it is absent or None is an en dash.
"""

from __future__ import annotations

import html
import io
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_mnist.report.axes import linear_axis, log_axis, step_axis
from lit_mnist.report.curves import Plot, Series, figure
from lit_mnist.report.facts import block, code, configuration, data_rows
from lit_mnist.report.formats import MISSING, SPACE, count, duration, number, short, size, text
from lit_mnist.report.page import frame, one_line, write_page
from lit_mnist.report.style import COMPARISON_STYLE

CHECKS = ("initial_weights", "samples", "learning_rate", "loss", "weights", "test")
EXACT = ("initial_weights", "samples")  # no rounding explains a difference in these
CURVE_STYLES = 6
TONES = {"": "", "bad": "bold red", "soft": "dim"}  # of a cell, in the terminal
MARKS = "✓ identical", "≈ not identical, as close as expected", "≠ differs", f"{MISSING} not compared"
WHO = {"engine": "● engine file", "library": "◆ library", "project": "◇ project", "nobody": "○ nobody"}
# of each column the heading on the page and in the terminal, and the style of its cells
EQUAL_HEADS = [
    ("Engine", "engine", ""),
    ("Ranks", "ranks", "figure"),
    ("Expected", "expected", "word"),
    ("Initial weights", "init", "mark"),
    ("Samples", "data", "mark"),
    ("Learning rate", "lr", "mark"),
    ("Loss", "loss", "mark"),
    ("Weights", "weights", "mark"),
    ("Test", "test", "mark"),
    ("Largest difference", "largest", "figure"),
    ("Weights SHA-256", "sha256", "hash"),
]
COST_HEADS = [
    ("Engine", "engine", ""),
    ("Images per second", "images/s", "figure"),
    ("Ratio to {}", "ratio", "figure"),
    ("To first step", "1st step", "figure"),
    ("Peak memory", "memory", "figure"),
    ("Sent per step", "sent/step", "figure"),
    ("Payload per step", "payload", "figure"),
    ("Collectives per step", "calls", "figure parts"),
    ("Lines of code", "lines", "figure"),
]


@dataclass(frozen=True)
class Cell:
    """A table's cell in plain text.

    Args:
        shown: What is seen in both forms.
        tone: `bad`, `soft` or nothing.
        said: What a screen reader adds to a mark.
        below: A second, smaller line, on the page only.
        bar: The length of a bar, 0 to 1, on the page only.
    """

    shown: str
    tone: str = ""
    said: str = ""
    below: str = ""
    bar: float | None = None


def write_comparison(path: Path, comparison: Mapping[str, Any]) -> None:
    """Writes the page of a comparison; a reader sees the old file or the whole new one, never a part.

    Args:
        path: The file to write; its folder must exist.
        comparison: The content of `comparison.json`.

    Raises:
        OSError: The file cannot be written.
    """
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
    header = (
        f"<header><p class=over>{text(part(comparison, 'data').get('name'))} · {text(net)}</p>"
        f'<h1 class="{tone}">{big} <span>{words}</span></h1>{apart}{one_line(ran)}</header>'
    )
    absent = not_run(comparison)
    sections = [
        ("Equal or not", equality(comparison)),
        ("Loss", losses(comparison)),
        ("Cost", cost(comparison)),
        ("What each does for you", features(part(comparison, "features"))),
        *([("Skipped and failed", page_list(absent))] if absent else []),
        ("The run", origin(comparison)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections)
    write_page(path, frame(f"{big} {words}", header + body, COMPARISON_STYLE))


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
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colour, highlight=False)
    big, words, tone = headline(comparison)
    costs = [[*row[:2], Cell(row[1].below), *row[2:]] for row in cost_rows(comparison)]
    heads = [*COST_HEADS[:2], ("", "from to", "figure"), *COST_HEADS[2:]]
    parts: list[Text | Table] = [Text(f"{big} {words}", TONES[tone] or "bold"), *map(Text, notes(comparison))]
    parts += [Text(), Text("Equal or not", "bold")]
    parts += [text_table(EQUAL_HEADS, equal_rows(comparison), gap), Text("   ".join(MARKS))]
    parts += [Text(), Text(f"Cost: {method(comparison)}"), text_table(heads, costs, gap)]
    for title, rows in (("First differences", differences(comparison)), ("Skipped and failed", not_run(comparison))):
        if rows:
            parts += [Text(), Text(title, "bold"), text_list(rows)]
    for each in parts:
        console.print(each)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def part(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a mapping's mapping of that name, an empty one where it is absent or None."""
    inner: Mapping[str, Any] = mapping.get(name) or {}
    return inner


def engines(comparison: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the engines in the comparison's order."""
    return comparison.get("engines") or []


def took_part(engine: Mapping[str, Any]) -> bool:
    """Returns whether an engine was neither skipped nor failed."""
    return engine.get("status") not in ("skipped", "failed")


def met(engine: Mapping[str, Any]) -> bool | None:
    """Returns whether an engine met what is expected of it; None for the reference and where nobody can say."""
    answer: bool | None = part(engine, "comparison").get("met")
    return answer if took_part(engine) else None


def plain(value: object) -> str:
    """Returns any value as text without control characters, which a terminal would obey."""
    # what is not UTF-8 in an argument reaches Python as lone surrogates, which no stream takes
    return html.unescape(text(value)).encode("utf-8", "backslashreplace").decode("utf-8")


def label(engine: Mapping[str, Any]) -> str:
    """Returns an engine's name with its variant, in plain text."""
    variant = engine.get("variant")
    return plain(engine.get("name")) + (f" ({plain(variant)})" if variant else "")


def reference(comparison: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the engine that the others are compared with, the first unjudged one of that name; empty without one."""
    name = comparison.get("reference")
    named = (each for each in engines(comparison) if name is not None and name in (each.get("name"), label(each)))
    return next((each for each in named if part(each, "comparison").get("met") is None), {})


def headline(comparison: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns the verdict as a large figure, its words and a tone."""
    everyone, sure = engines(comparison), agreeing(comparison)
    ran = sum(map(took_part, everyone))
    wrong = [met(engine) for engine in everyone].count(False)
    if wrong:
        return f"{wrong} of {wrong + len(sure)}", "engines differ" if wrong > 1 else "engines differs", "bad"
    if all(met(engine) is None for engine in everyone):
        return f"{ran} of {len(everyone)}", "engines ran" + ", and nothing was compared" * (ran > 0), "bad"
    big = f"{len(sure)} of {len(sure)}"
    if comparison.get("equal") is False:
        return big, "engines agree, but the comparison as a whole did not pass", "bad"
    return big, "engines trained the same bits" if all(sure) else "engines agree as closely as expected", ""


def agreeing(comparison: Mapping[str, Any]) -> list[bool]:
    """Returns for the reference and each engine that met what is expected whether its weights are the same bits."""
    chosen = reference(comparison)
    return [
        each is chosen or part(each, "comparison").get("weights") is True
        for each in engines(comparison)
        if took_part(each) and (each is chosen or met(each))
    ]


def notes(comparison: Mapping[str, Any]) -> list[str]:
    """Returns what the headline leaves out: how many are merely close, and who failed, was skipped or not judged."""
    everyone, sure = engines(comparison), agreeing(comparison)
    states = [engine.get("status") for engine in everyone]
    wrong = [met(engine) for engine in everyone].count(False)
    apart = {
        "failed": states.count("failed"),
        "skipped": states.count("skipped"),
        "not judged": sum(map(took_part, everyone)) - len(sure) - wrong,
    }
    close = [] if all(sure) else [f"{sum(sure)} in every bit, {len(sure) - sum(sure)} as closely as expected"]
    return close + [", ".join(f"{n} {word}" for word, n in apart.items() if n)] * any(apart.values())


def mark(engine: Mapping[str, Any], check: str) -> Cell:
    """Returns how a check of an engine came out, as one of `MARKS`."""
    same = part(engine, "comparison").get(check)
    close = met(engine) is True and check not in EXACT
    glyph, words = MARKS[3 if same is None else 0 if same else 1 if close else 2].split(" ", 1)
    return Cell(glyph, "soft" if same is None else "" if same or close else "bad", said=words)


def equal_rows(comparison: Mapping[str, Any]) -> list[list[Cell]]:
    """Returns the first table's rows, one per engine, with the columns of `EQUAL_HEADS`."""
    chosen, rows = reference(comparison), []
    for engine in engines(comparison):
        asked, answer = plain(part(engine, "comparison").get("expected")), met(engine)
        if not took_part(engine):
            failed = engine.get("status") == "failed"
            expected = Cell("✗ failed", "bad") if failed else Cell("skipped", "soft")
        elif engine is chosen:
            expected = Cell("reference", "soft")
        elif answer is None:
            expected = Cell(asked, "soft", said="not judged")
        else:
            expected = Cell(
                f"{'✓' if answer else '✗'} {asked}", "" if answer else "bad", "met" if answer else "not met"
            )
        largest = part(engine, "comparison").get("largest_difference")
        hashes = sorted({plain(value) for value in engine.get("weights_sha256") or [] if value is not None})
        digest = Cell("ranks differ", "bad") if len(hashes) > 1 else Cell((hashes or [MISSING])[0][:8])
        far = Cell("0" if largest == 0 else number(largest, 2))
        checks = [mark(engine, check) for check in CHECKS]
        rows.append([Cell(label(engine)), Cell(count(engine.get("world_size"))), expected, *checks, far, digest])
    return rows


def differences(comparison: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns each engine's first difference: its name, the sentence, and nothing to type."""
    found = ((label(engine), part(engine, "comparison").get("first_difference")) for engine in engines(comparison))
    rows = []
    for name, first in found:
        if first is not None:
            tensor = f" in {plain(first['tensor'])}" if first.get("tensor") is not None else ""
            words = f"step {count(first.get('step'))}: {plain(first.get('what'))} differ first{tensor}"
            rows.append((name, words if first.get("text") is None else plain(first["text"]), ""))
    return rows


def not_run(comparison: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the skipped and failed engines: the name, the reason, and the command that installs what is missing."""
    absent = [engine for engine in engines(comparison) if not took_part(engine)]
    return [
        (label(each), f"{plain(each.get('status'))}: {plain(each.get('reason'))}", plain(each.get("install") or ""))
        for each in absent
    ]


def method(comparison: Mapping[str, Any]) -> str:
    """Returns how the figures of the cost were got."""
    repeats, left = (count(comparison.get(name)) for name in ("repeats", "warm_up_steps"))
    return f"medians of {repeats} repeats, from the lowest to the highest; the first {left} steps are left out"


def spread(figures: Mapping[str, Any], write: Callable[[float | None], str], best: float = 0.0) -> Cell:
    """Returns a median with its range, and with a bar for its share of the best."""
    median, low, high = (figures.get(name) for name in ("median", "lowest", "highest"))
    below = "" if low is None or high is None or low == high else f"{write(low)} to {write(high)}"
    share = median / best if best > 0 and median is not None and math.isfinite(median) else None
    return Cell(write(median), below=below, bar=share)


def cost_rows(comparison: Mapping[str, Any]) -> list[list[Cell]]:
    """Returns the second table's rows, one per engine that took part, with the columns of `COST_HEADS`."""
    ran = [engine for engine in engines(comparison) if took_part(engine)]
    costs = [part(engine, "cost") for engine in ran]
    speeds = [part(each, "images_per_s").get("median") for each in costs]
    best = max((speed for speed in speeds if speed is not None and math.isfinite(speed)), default=0.0)
    base = part(part(reference(comparison), "cost"), "images_per_s").get("median")
    rows = []
    for engine, each, speed in zip(ran, costs, speeds, strict=True):
        ratio = speed / base if speed is not None and base else math.nan
        calls = {name: times for name, times in part(each, "collectives_per_step").items() if times is not None}
        names = ", ".join(f"{plain(name)}{SPACE}{short(round(times, 2))}" for name, times in calls.items())
        rows.append(
            [
                Cell(label(engine)),
                spread(part(each, "images_per_s"), number, best),
                Cell(f"{ratio:.2f}" if math.isfinite(ratio) else MISSING),
                spread(part(each, "seconds_to_first_step"), duration),
                spread(part(each, "peak_memory_bytes"), size),
                *(Cell(size(each.get(f"{name}_per_step"))) for name in ("bytes_sent", "payload_bytes")),
                Cell(short(round(sum(calls.values()), 2)) if calls else MISSING, below=names),
                Cell(count(each.get("lines_of_code"))),
            ]
        )
    return rows


def page_table(name: str, heads: Iterable[tuple[str, str, str]], rows: Iterable[Sequence[Cell]]) -> str:
    """Returns rows as a table that scrolls inside its box, the first cell of each row being its name."""
    styles = [style for _, _, style in heads]
    head = "".join(f'<th scope=col class="{style}">{text(title)}</th>' for title, _, style in heads)
    lines = []
    for first, *rest in rows:
        cells = []
        for cell, style in zip(rest, styles[1:], strict=True):
            said = f"<span class=said> {text(cell.said)}</span>" if cell.said else ""
            bar = "" if cell.bar is None else f'<span class=bar><i style="width:{100 * cell.bar:.1f}%"></i></span>'
            below = f"<small>{text(cell.below)}</small>" if cell.below else ""
            cells.append(f'<td class="{style} {cell.tone}">{text(cell.shown)}{said}{bar}{below}</td>')
        lines.append(f"<tr><th scope=row>{text(first.shown)}</th>{''.join(cells)}</tr>")
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{name}"><table class=cells>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def page_list(rows: Iterable[tuple[str, str, str]]) -> str:
    """Returns names with a sentence and perhaps a command each."""
    items = (
        f"<li><b>{text(name)}</b>{text(words)}{code(command) if command else ''}</li>" for name, words, command in rows
    )
    return f"<ul class=firsts>{''.join(items)}</ul>"


def text_table(heads: Iterable[tuple[str, str, str]], rows: Iterable[Sequence[Cell]], gap: int) -> Table:
    """Returns rows as a table for the terminal, in which only the engines' names may be broken."""
    found = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for n, (_, head, style) in enumerate(heads):
        place: Any = "right" if "figure" in style else "center" if style == "mark" else "left"
        found.add_column(Text(head), justify=place, no_wrap=n > 0, overflow="fold")
    for row in rows:
        found.add_row(*(Text(cell.shown.replace(SPACE, " "), TONES[cell.tone]) for cell in row))
    return found


def text_list(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Returns names with a sentence and perhaps a command each, the sentences in one column."""
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(max_width=36, overflow="fold")
    found.add_column(overflow="fold")
    for name, words, command in rows:
        found.add_row(Text(name), Text(f"{words}\n{command}".rstrip()))
    return found


def equality(comparison: Mapping[str, Any]) -> str:
    """Returns the section that says check by check who is equal, and where the others part from the reference."""
    if not engines(comparison):
        return "<p class=quiet>No engine was asked for.</p>"
    keys = "".join(f"<span><b>{glyph}</b> {text(words)}</span>" for glyph, words in (m.split(" ", 1) for m in MARKS))
    firsts = differences(comparison)
    return (
        page_table("Equal or not", EQUAL_HEADS, equal_rows(comparison))
        + f'<p class="quiet keys">{keys}</p>'
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
    return drawn + "<p class=quiet>Engines with the same loss in every bit of every step share a line.</p>"


def cost(comparison: Mapping[str, Any]) -> str:
    """Returns the section of what each engine takes."""
    rows = cost_rows(comparison)
    if not rows:
        return "<p class=quiet>No engine ran.</p>"
    named = [(title.format(plain(comparison.get("reference"))), *rest) for title, *rest in COST_HEADS]
    return (
        f'<p class="quiet method">{text(method(comparison).capitalize())}.</p>'
        f"{page_table('Cost', [(title, short_, style) for title, short_, style in named], rows)}"
    )


def features(found: Mapping[str, Any]) -> str:
    """Returns who does what: the engine's own file, its library, a shared part of the project, or nobody."""
    columns, rows = found.get("columns") or [], found.get("rows") or []
    if not columns or not rows:
        return "<p class=quiet>No features were recorded.</p>"
    cells = []
    for row in rows:
        who = [part(row, "who").get(name) for name in columns]
        answers = [Cell(WHO.get(str(each), plain(each)), "soft" if each in (None, "nobody") else "") for each in who]
        cells.append([Cell(plain(row.get("feature"))), *answers])
    return page_table("What each does for you", [(plain(name), "", "word") for name in ("", *columns)], cells)


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
