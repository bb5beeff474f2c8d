"""Measurements in interleaved rounds, A B A B ..., so that a change on the machine affects all of them."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_mnist.errors import InputError
from lit_mnist.profiling.timing import spread

# What can be measured, and in which unit.
UNITS = {
    "images_per_s": "images/s",
    "seconds": "s",
    "step_ms": "ms",
    "memory_bytes": "bytes",
    "bytes_per_s": "bytes/s",
}
Numbers = Mapping[str, float]
Rows = Mapping[str, Sequence[Numbers]]


@dataclass(frozen=True)
class Measurement:
    """A measurement in a separate process.

    Attributes:
        name: Its name, unique within a topic.
        take: Measures once in an empty folder, and returns numbers by name.
        key: The name of the main number, one of `UNITS`.
        unless: Returns why this cannot be measured here, given the earlier measurements of the first round; the
            others are measured.
    """

    name: str
    take: Callable[[Path], Numbers]
    key: str = "images_per_s"
    unless: Callable[[Rows], str | None] | None = None


@dataclass(frozen=True)
class Ratio:
    """Two measurements of one topic, compared within each round.

    Attributes:
        of: Name of the one.
        to: Name of the other, by which it is divided.
        at_least: What is asked for, if anything.
        at_most: Likewise.
    """

    of: str
    to: str
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Topic:
    """Interleaved measurements, and the ratios computed from them.

    Attributes:
        name: Its name on the command line and in `bench.json`.
        title: Its heading.
        measurements: What is measured in each round, in this order.
        ratios: What is compared.
        analyse: Computes more from the numbers of all rounds, for `bench.json` and the page.
        notes: Sentences for the reader.
    """

    name: str
    title: str
    measurements: Sequence[Measurement]
    ratios: Sequence[Ratio] = ()
    analyse: Callable[[Rows], Mapping[str, Any]] | None = None
    notes: Sequence[str] = field(default=())


def run_rounds(
    topic: Topic,
    repeats: int,
    scratch: Path,
    log: Callable[[str], None],
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measures a topic, round by round, and returns its numbers as plain values.

    Args:
        topic: What to measure.
        repeats: Rounds, at least one.
        scratch: Folder for what a measurement writes, which is removed after it.
        log: Prints the progress.
        save: Receives the numbers of all rounds so far, after each round.

    Raises:
        InputError: A measurement cannot be taken.
    """
    rows: dict[str, list[Numbers]] = {measurement.name: [] for measurement in topic.measurements}
    left_out: dict[str, str] = {}
    found: dict[str, Any] = {}
    for repeat in range(repeats):
        for number, measurement in enumerate(topic.measurements):
            if repeat == 0 and measurement.unless and (reason := measurement.unless(rows)):
                left_out[measurement.name] = reason
                log(f"{topic.name}: {measurement.name} is left out. {reason}")
            if measurement.name in left_out:
                continue
            log(f"{topic.name}: round {repeat + 1} of {repeats}, {measurement.name}")
            folder = scratch / f"{topic.name}-{repeat}-{number}"
            folder.mkdir(parents=True)
            rows[measurement.name].append(measurement.take(folder))
            shutil.rmtree(folder)
        found = _summary(topic, repeat + 1, rows, left_out)
        save(found)
    return found


def _summary(topic: Topic, rounds: int, rows: Rows, left_out: Mapping[str, str]) -> dict[str, Any]:
    return {
        "title": topic.title,
        "repeats": rounds,
        "rows": [_row(each, rows[each.name]) for each in topic.measurements if each.name not in left_out],
        "ratios": [_compared(ratio, topic, rows) for ratio in topic.ratios if not {ratio.of, ratio.to} & set(left_out)],
        "left_out": [{"name": name, "reason": reason} for name, reason in left_out.items()],
        "notes": list(topic.notes),
        **(topic.analyse(rows) if topic.analyse else {}),
    }


def _row(measurement: Measurement, taken: Sequence[Numbers]) -> dict[str, Any]:
    values = [numbers[measurement.key] for numbers in taken]
    others = {name for numbers in taken for name in numbers} - {measurement.key}
    return {
        "name": measurement.name,
        "unit": UNITS[measurement.key],
        "runs": values,
        **(spread(values) or {}),
        "others": {name: statistics.median(numbers[name] for numbers in taken) for name in sorted(others)},
    }


def _compared(ratio: Ratio, topic: Topic, rows: Rows) -> dict[str, Any]:
    """Returns the ratio of each round's pair, and its median: the state of the machine in that round affects both."""
    keys = {measurement.name: measurement.key for measurement in topic.measurements}
    pairs = zip(rows[ratio.of], rows[ratio.to], strict=True)
    runs = [one[keys[ratio.of]] / other[keys[ratio.to]] for one, other in pairs]
    found = spread(runs)
    assert found is not None
    met = None
    if ratio.at_least is not None:
        met = found["median"] >= ratio.at_least
    elif ratio.at_most is not None:
        met = found["median"] <= ratio.at_most
    asked = {"at_least": ratio.at_least, "at_most": ratio.at_most}
    return {"of": ratio.of, "to": ratio.to, "runs": runs, **found, **asked, "met": met}


def check_repeats(repeats: int) -> None:
    """Checks the number of rounds.

    Raises:
        InputError: It is less than 1.
    """
    if repeats < 1:
        raise InputError(f"--repeats must be at least 1, but is {repeats}.")
