"""The cells, rows and captions of a comparison's tables, in plain text, as the page and the terminal both show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lit_mnist.report.comparison_verdict import engines, label, met, part, plain, reference, took_part
from lit_mnist.report.formats import MISSING, SPACE, count, duration, number, short, size

Entry = tuple[str, str, str]  # a name, a sentence about it, and a command to type or nothing

CHECKS = ("initial_weights", "samples", "learning_rate", "loss", "weights", "test")
EXACT = ("initial_weights", "samples")  # no rounding explains a difference in these
MARKS = ("✓", "identical"), ("≈", "not identical, and need not be"), ("≠", "differs"), (MISSING, "not compared")
EXPECTED = {
    "bits": "the same bits in each step, on each rank",
    "rounding": (
        "on another number of ranks sums are rounded otherwise, and each step carries that further: judged are the "
        "initial weights, samples, learning rates and, but for rounding, the first loss; a figure in brackets is not"
    ),
    "samples": (
        "batch norm sees each GPU's samples alone: judged are the initial weights, samples and learning rates; a "
        "figure in brackets is not"
    ),
    "1e-05 relative": (
        "the same initial weights, samples and learning rates, and final weights that differ by at most 1e-5 of their "
        "tensor's largest"
    ),
}
COUNTED = {
    "Sent": "bytes that the busiest rank sent to the others, by the kernel's TCP counters and batch norm's own",
    "Payload": "bytes handed to collectives, sends and batch norm's exchange",
    "Calls": "collectives, sends, receives and exchanges per step",
    "Peak memory": "what no other process shares: of ranks that are forked, nothing that their launcher had loaded",
    "Lines": "of code in the engine's own files, for Lightning also those of its module, data module and callbacks",
}


@dataclass(frozen=True)
class Cell:
    """A table's cell.

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


@dataclass(frozen=True)
class Column:
    """A table's column.

    Args:
        title: Its heading on the page.
        head: Its heading in the terminal.
        style: How its cells look: `figure`, `parts`, `word`, `mark`, `hash` or nothing.
    """

    title: str
    head: str = ""
    style: str = ""


@dataclass(frozen=True)
class Grid:
    """A table: its columns, and rows with a cell for each of them, the first being the row's name."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def filled(self) -> Grid:
        """Returns the table without the columns in which nobody has a value."""
        kept = [n for n in range(len(self.columns)) if n == 0 or any(row[n].shown != MISSING for row in self.rows)]
        return Grid([self.columns[n] for n in kept], [[row[n] for n in kept] for row in self.rows])


EQUAL_COLUMNS = (
    Column("Engine", "engine"),
    Column("Ranks", "ranks", "figure"),
    Column("Expected", "expected", "word"),
    Column("Initial weights", "init", "mark"),
    Column("Samples", "data", "mark"),
    Column("Learning rate", "lr", "mark"),
    Column("Loss", "loss", "mark"),
    Column("Weights", "weights", "mark"),
    Column("Test", "test", "mark"),
    Column("Largest difference in weights", "largest", "figure"),
    Column("Weights SHA-256", "sha256", "hash"),
)
COST_COLUMNS = (
    Column("Engine", "engine"),
    Column("Images per second", "images/s", "figure"),
    Column("Ratio", "ratio", "figure"),
    Column("To first step", "1st step", "figure"),
    Column("Peak memory", "memory", "figure"),
    Column("Sent per step", "sent/step", "figure"),
    Column("Payload per step", "payload", "figure"),
    Column("Calls per step", "calls", "figure parts"),
    Column("Lines of code", "lines", "figure"),
)


def equal_grid(comparison: Mapping[str, Any]) -> Grid:
    """Returns check by check how each engine compares with the reference."""
    chosen, rows = reference(comparison), []
    for engine in engines(comparison):
        checks = [mark(engine, check) for check in CHECKS]
        hashes = sorted({plain(value) for value in engine.get("weights_sha256") or [] if value is not None})
        digest = Cell("ranks differ", "bad") if len(hashes) > 1 else Cell((hashes or [MISSING])[0][:8])
        ranks = Cell(count(engine.get("world_size")))
        asked = expectation(engine, is_reference=engine is chosen)
        rows.append([Cell(label(engine)), ranks, asked, *checks, distance(engine), digest])
    return Grid(EQUAL_COLUMNS, rows)


def expectation(engine: Mapping[str, Any], *, is_reference: bool) -> Cell:
    """Returns what is expected of an engine and whether that was met."""
    if not took_part(engine):
        return Cell("✗ failed", "bad") if engine.get("status") == "failed" else Cell("skipped", "soft")
    if is_reference:
        return Cell("reference", "soft")
    asked, answer = plain(part(engine, "comparison").get("expected")), met(engine)
    if answer is None:
        return Cell(asked, "soft", said="not judged")
    return Cell(f"✓ {asked}", said="met") if answer else Cell(f"✗ {asked}", "bad", "not met")


def mark(engine: Mapping[str, Any], check: str) -> Cell:
    """Returns how a check of an engine came out, as one of `MARKS`."""
    same = part(engine, "comparison").get(check)
    close = met(engine) is True and check not in EXACT
    glyph, words = MARKS[3 if same is None else 0 if same else 1 if close else 2]
    return Cell(glyph, "soft" if same is None else "" if same or close else "bad", said=words)


def distance(engine: Mapping[str, Any]) -> Cell:
    """Returns how far an engine's final weights are from the reference's, in brackets where that is not judged."""
    judged = part(engine, "comparison")
    largest = judged.get("largest_difference")
    written = "0" if largest == 0 else number(largest, 2)
    if largest and judged.get("expected") in {"rounding", "samples"}:
        return Cell(f"({written})", "soft", said="not judged")
    return Cell(written)


def expectations(comparison: Mapping[str, Any]) -> list[Entry]:
    """Returns what each expectation means that somebody is held to."""
    asked = [part(each, "comparison").get("expected") for each in engines(comparison) if took_part(each)]
    return [(name, words, "") for name, words in EXPECTED.items() if name in asked]


def differences(comparison: Mapping[str, Any]) -> list[Entry]:
    """Returns each engine's first difference."""
    found = ((label(engine), part(engine, "comparison").get("first_difference")) for engine in engines(comparison))
    rows = []
    for name, first in found:
        if first is not None:
            tensor = f" in {plain(first['tensor'])}" if first.get("tensor") is not None else ""
            words = f"step {count(first.get('step'))}: {plain(first.get('what'))} differ first{tensor}"
            rows.append((name, words if first.get("text") is None else plain(first["text"]), ""))
    return rows


def not_run(comparison: Mapping[str, Any]) -> list[Entry]:
    """Returns the skipped and failed engines with the reason, and with the command that installs what is missing."""
    rows = []
    for engine in engines(comparison):
        if not took_part(engine):
            reason, install = plain(engine.get("reason")), plain(engine.get("install") or "")
            if install:  # it stands apart, to be copied
                reason = reason.removesuffix(install).rstrip(": ")
            rows.append((label(engine), f"{plain(engine.get('status'))}: {reason}", install))
    return rows


def cost_grid(comparison: Mapping[str, Any]) -> Grid:
    """Returns what each engine takes that took part, without the columns in which nothing was measured."""
    ran = [engine for engine in engines(comparison) if took_part(engine)]
    speeds = [part(part(engine, "cost"), "images_per_s").get("median") for engine in ran]
    best = max((speed for speed in speeds if speed is not None and math.isfinite(speed)), default=0.0)
    chosen = reference(comparison)
    rows = []
    for engine in ran:
        each = part(engine, "cost")
        rows.append(
            [
                Cell(label(engine)),
                spread(part(each, "images_per_s"), number, best),
                ratio(engine, chosen),
                spread(part(each, "seconds_to_first_step"), duration),
                spread(part(each, "peak_memory_bytes"), size),
                *(Cell(size(each.get(f"{name}_per_step"))) for name in ("bytes_sent", "payload_bytes")),
                calls(each.get("collectives_per_step")),
                Cell(count(each.get("lines_of_code"))),
            ]
        )
    named = f"Ratio to {plain(comparison.get('reference'))}"
    return Grid([replace(c, title=named) if c.head == "ratio" else c for c in COST_COLUMNS], rows).filled()


def spread(figures: Mapping[str, Any], write: Callable[[float | None], str], best: float = 0.0) -> Cell:
    """Returns a median with its range, and with a bar for its share of the best."""
    median, low, high = (figures.get(name) for name in ("median", "lowest", "highest"))
    below = "" if low is None or high is None or low == high else f"{write(low)} to {write(high)}"
    share = median / best if best > 0 and median is not None and math.isfinite(median) else None
    return Cell(write(median), below=below, bar=share)


def ratio(engine: Mapping[str, Any], chosen: Mapping[str, Any]) -> Cell:
    """Returns an engine's speed by the reference's, with its ranks where those are not as many."""
    speed, base = (part(part(each, "cost"), "images_per_s").get("median") for each in (engine, chosen))
    share = speed / base if speed is not None and base else math.nan
    ranks = engine.get("world_size")
    below = "" if ranks in (None, chosen.get("world_size")) else f"on {count(ranks)}{SPACE}rank{'s' * (ranks != 1)}"
    return Cell(f"{share:.2f}", below=below) if math.isfinite(share) else Cell(MISSING)


def calls(counts: Mapping[str, float | None] | None) -> Cell:
    """Returns how many collectives, sends and receives there were, with each one's name; none is a count, too."""
    known = {name: times for name, times in (counts or {}).items() if times is not None}
    if counts is None or len(known) < len(counts):
        return Cell(MISSING)
    names = ", ".join(f"{plain(name)}{SPACE}{short(round(times, 2))}" for name, times in known.items())
    return Cell(short(round(sum(known.values()), 2)), below=names)


def timing(comparison: Mapping[str, Any]) -> str:
    """Returns how the timed figures were got, or that there are none."""
    kinds = ("images_per_s", "seconds_to_first_step", "peak_memory_bytes")
    costs = [part(engine, "cost") for engine in engines(comparison) if took_part(engine)]
    timed = [kind for kind in kinds if any(part(each, kind).get("median") is not None for each in costs)]
    if not timed:
        return "nothing was timed"
    repeats, left = comparison.get("repeats"), comparison.get("warm_up_steps")
    runs = f" of {count(repeats)} runs" if repeats else ""
    how = "one timed run of each engine" if repeats == 1 else f"medians{runs}, with the lowest and the highest"
    return how + (f"; the speed leaves the first {count(left)} steps out" if left and kinds[0] in timed else "")


def counted(grid: Grid) -> list[Entry]:
    """Returns what the cost's columns of traffic count, for those that are in the table."""
    return [(name, words, "") for name, words in COUNTED.items() if any(c.title.startswith(name) for c in grid.columns)]
