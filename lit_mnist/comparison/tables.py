"""The headline, tables and notes of a comparison, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_mnist.report.formats import MISSING, SPACE, count, duration, number, plural, short, size
from lit_mnist.report.table import Cell, Column, Entry, Table, spread_cell

Engine = Mapping[str, Any]

CHECKS = ("initial_weights", "samples", "learning_rate", "loss", "weights", "test")
EXACT = ("initial_weights", "samples")  # rounding does not explain a difference in these
MARKS = (
    Entry("✓", "identical"),
    Entry("≈", "not identical, as expected"),
    Entry("≠", "differs"),
    Entry(MISSING, "not compared"),
)
EXPECTED = {
    "bits": "bit-identical in each step, on each rank",
    "rounding": (
        "on another number of ranks, sums round differently, and each step amplifies that: the initial weights, "
        "samples, learning rates and, except for rounding, the first loss are checked; a number in brackets is not"
    ),
    "samples": (
        "batch norm uses the samples of each GPU separately: the initial weights, samples and learning rates are "
        "checked; a number in brackets is not"
    ),
    "1e-05 relative": (
        "the same initial weights, samples and learning rates, and final weights that differ by at most 1e-5 of the "
        "largest value of their tensor"
    ),
}
_UNCHECKED = ("rounding", "samples")  # expectations without a limit for the final weights
MEASURED = {
    "Sent": "bytes that the busiest rank sent to the others, by the TCP counters of the kernel and of batch norm",
    "Payload": "bytes passed to collectives, sends and the exchange of batch norm",
    "Calls": "collectives, sends, receives and exchanges per step",
    "Peak memory": "not shared with another process: forked ranks do not count what their launcher had loaded",
    "Lines": "of code in the files of the engine, for Lightning also in its module, data module and callbacks",
}
EQUALITY_COLUMNS = (
    Column("Engine", "engine"),
    Column("Ranks", "ranks", "num"),
    Column("Expected", "expected", "word"),
    Column("Initial weights", "init", "mark"),
    Column("Samples", "data", "mark"),
    Column("Learning rate", "lr", "mark"),
    Column("Loss", "loss", "mark"),
    Column("Weights", "weights", "mark"),
    Column("Test", "test", "mark"),
    Column("Largest difference in weights", "largest", "num"),
    Column("Weights SHA-256", "sha256", "hash"),
)
COST_COLUMNS = (
    Column("Engine", "engine"),
    Column("Images per second", "images/s", "num"),
    Column("Ratio", "ratio", "num"),
    Column("To first step", "1st step", "num"),
    Column("Peak memory", "memory", "num"),
    Column("Sent per step", "sent/step", "num"),
    Column("Payload per step", "payload", "num"),
    Column("Calls per step", "calls", "num parts"),
    Column("Lines of code", "lines", "num"),
)


def label(engine: Engine) -> str:
    """Returns the name of an engine with its variant."""
    return engine["name"] + (f" ({engine['variant']})" if engine["variant"] else "")


def finished(comparison: Mapping[str, Any]) -> list[Engine]:
    """Returns the engines that ran, the reference first."""
    ran = [engine for engine in comparison["engines"] if engine["status"] == "ran"]
    return sorted(ran, key=lambda engine: engine["comparison"] is not None)


def headline(comparison: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns the verdict: a number in large type, words, and a tone."""
    ran = finished(comparison)
    different = sum(not engine["comparison"]["met"] for engine in ran[1:])
    if different:
        return f"{different} of {len(ran)}", "engines differ" if different > 1 else "engines differs", "bad"
    if len(ran) < 2:
        words = "engines ran" + ", and nothing was compared" * len(ran)
        return f"{len(ran)} of {len(comparison['engines'])}", words, "bad"
    big = f"{len(ran)} of {len(ran)}"
    if not comparison["equal"]:
        return big, "engines agree, but not every engine finished", "bad"
    identical = _identical(ran) == len(ran)
    return big, "engines trained bit-identical weights" if identical else "engines agree as closely as expected", ""


def notes(comparison: Mapping[str, Any]) -> list[str]:
    """Returns details of the headline: how many are not identical, and how many failed or were skipped."""
    ran, states = finished(comparison), [engine["status"] for engine in comparison["engines"]]
    met = [engine for n, engine in enumerate(ran) if n == 0 or engine["comparison"]["met"]]
    identical = _identical(met)
    absent = ", ".join(f"{states.count(state)} {state}" for state in ("failed", "skipped") if state in states)
    close = f"{identical} bit-identical, {len(met) - identical} as close as expected"
    return [close] * (identical < len(met)) + [absent] * bool(absent)


def _identical(engines: Sequence[Engine]) -> int:
    """Returns how many engines have the weights of the reference, the reference included."""
    return sum(engine["comparison"] is None or engine["comparison"]["weights"] for engine in engines)


def equality_table(comparison: Mapping[str, Any]) -> Table:
    """Returns the checks of each engine against the reference."""
    rows = []
    for engine in comparison["engines"]:
        found = engine["comparison"] if engine["status"] == "ran" else None
        hashes = sorted(set(engine.get("weights_sha256") or ()))
        digest = Cell("ranks differ", "bad") if len(hashes) > 1 else Cell((hashes or [MISSING])[0][:8])
        checks = [_check(found, check) for check in CHECKS]
        ranks = Cell(count(engine["world_size"]))
        rows.append([Cell(label(engine)), ranks, _expectation(engine), *checks, _distance(found), digest])
    return Table(EQUALITY_COLUMNS, rows)


def _expectation(engine: Engine) -> Cell:
    if engine["status"] != "ran":
        return Cell("✗ failed", "bad") if engine["status"] == "failed" else Cell("skipped", "muted")
    found = engine["comparison"]
    if found is None:
        return Cell("reference", "muted")
    return (
        Cell(f"✓ {found['expected']}", hint="met") if found["met"] else Cell(f"✗ {found['expected']}", "bad", "not met")
    )


def _check(found: Mapping[str, Any] | None, check: str) -> Cell:
    same = found and found[check]
    if found is None or same is None:
        return Cell(MISSING, "muted", MARKS[3].text)
    close = found["met"] and check not in EXACT
    mark = MARKS[0 if same else 1 if close else 2]
    return Cell(mark.name, "" if same or close else "bad", mark.text)


def _distance(found: Mapping[str, Any] | None) -> Cell:
    """Returns the largest difference in the final weights, in brackets if it is not checked."""
    largest = found and found["largest_difference"]
    if found is None or not largest:
        return Cell(MISSING if largest is None else "0")
    if found["expected"] in _UNCHECKED:
        return Cell(f"({number(largest, 2)})", "muted", "not checked")
    return Cell(number(largest, 2))


def expectations(comparison: Mapping[str, Any]) -> list[Entry]:
    """Returns the meaning of each expectation in the table."""
    used = {engine["comparison"]["expected"] for engine in finished(comparison)[1:]}
    return [Entry(name, text) for name, text in EXPECTED.items() if name in used]


def differences(comparison: Mapping[str, Any]) -> list[Entry]:
    """Returns the first difference of each engine."""
    found = [(label(engine), engine["comparison"]["first_difference"]) for engine in finished(comparison)[1:]]
    return [Entry(name, difference["text"]) for name, difference in found if difference]


def not_run(comparison: Mapping[str, Any]) -> list[Entry]:
    """Returns the skipped and failed engines, with the reason and the command that installs missing packages."""
    rows = []
    for engine in comparison["engines"]:
        if engine["status"] != "ran":
            install = engine["install"] or ""
            reason = engine["reason"].removesuffix(install).rstrip(": ") if install else engine["reason"]
            rows.append(Entry(label(engine), f"{engine['status']}: {reason}", install))
    return rows


def cost_table(comparison: Mapping[str, Any]) -> Table:
    """Returns the cost of each engine that ran, without columns that have no measurement."""
    ran = finished(comparison)
    speeds = [engine["cost"]["images_per_s"] for engine in ran]
    best = max((speed["median"] for speed in speeds if speed), default=0.0)
    rows = []
    for engine in comparison["engines"]:
        if engine["status"] == "ran":
            cost = engine["cost"]
            rows.append(
                [
                    Cell(label(engine)),
                    spread_cell(cost["images_per_s"], number, best),
                    _ratio(engine, ran[0]),
                    spread_cell(cost["seconds_to_first_step"], duration),
                    spread_cell(cost["peak_memory_bytes"], size),
                    Cell(size(cost["bytes_sent_per_step"])),
                    Cell(size(cost["payload_bytes_per_step"])),
                    _calls(cost["collectives_per_step"]),
                    Cell(count(cost["lines_of_code"])),
                ]
            )
    title = f"Ratio to {comparison['reference']}"
    columns = [replace(column, title=title) if column.head == "ratio" else column for column in COST_COLUMNS]
    return Table(columns, rows).without_empty_columns()


def _ratio(engine: Engine, reference: Engine) -> Cell:
    """Returns the speed relative to the reference, and the number of ranks if it differs."""
    own, other = (each["cost"]["images_per_s"] for each in (engine, reference))
    if not own or not other:
        return Cell(MISSING)
    ranks = engine["world_size"]
    below = "" if ranks == reference["world_size"] else f"on {plural(ranks, 'rank')}"
    return Cell(f"{own['median'] / other['median']:.2f}", below=below)


def _calls(counts: Mapping[str, float] | None) -> Cell:
    """Returns the number of collectives, sends and receives, in total and by kind."""
    if counts is None:
        return Cell(MISSING)
    kinds = ", ".join(f"{name}{SPACE}{short(round(times, 2))}" for name, times in counts.items())
    return Cell(short(round(sum(counts.values()), 2)), below=kinds)


def timing(comparison: Mapping[str, Any]) -> str:
    """Returns how the times were measured."""
    timed = [engine["cost"]["images_per_s"] for engine in finished(comparison)]
    if not any(timed):
        return "nothing was timed"
    repeats, warm_up = comparison["repeats"], count(comparison["warm_up_steps"])
    how = "one timed run of each engine" if repeats == 1 else f"medians of {count(repeats)} runs, with their range"
    return f"{how}; the speed excludes the first {warm_up} steps"


def measures(table: Table) -> list[Entry]:
    """Explains the columns of the cost table."""
    titles = [column.title for column in table.columns]
    return [Entry(name, text) for name, text in MEASURED.items() if any(title.startswith(name) for title in titles)]
