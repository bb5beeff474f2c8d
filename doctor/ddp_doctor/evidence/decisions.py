"""Decisions that the ranks take differently: conditions of the user's code that depend on a rank's own data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ddp_doctor.evidence.conditions import condition_at, ends_training, skips_step
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.records.run import RankRecord

# The values of ranks may be added in different orders.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Decision:
    """A condition whose outcome differs between two ranks, and not by their numbers alone.

    Attributes:
        place: The user's `file:line in function`.
        text: The condition, such as `loss > best`.
        ranks: The two ranks.
        time: Which evaluation of the condition differs first, from 1.
        stops: Whether it decides when training ends: directly, or through a value that it sets.
        saves: Whether a checkpoint is written by it.
        lines: The first and the last line of what it decides about.
    """

    place: str
    text: str
    ranks: tuple[int, int]
    time: int
    stops: bool = False
    saves: bool = False
    lines: tuple[int, int] = (0, 0)

    def contains(self, place: str) -> bool:
        """Returns whether a place of the user's code is run or not by this decision."""
        path, _, rest = place.partition(" ")[0].rpartition(":")
        return self.place.startswith(f"{path}:") and self.lines[0] <= int(rest or 0) <= self.lines[1]


@dataclass(frozen=True)
class OwnValue:
    """A number that two ranks read differently where they decide whether training ends, or whether to step.

    Attributes:
        place: The user's `file:line in function`.
        text: The condition, such as `stopper.update(loss)`.
        operand: What differs, such as `loss`.
        ranks: The two ranks.
        values: Their numbers.
        skips: Whether the ranks decide whether the optimizer steps.
    """

    place: str
    text: str
    operand: str
    ranks: tuple[int, int]
    values: tuple[float, float]
    skips: bool = False


def different_decisions(evidence: Evidence) -> Sequence[Decision]:
    """Returns the decisions that two ranks take differently, those that end training first."""
    ranks = _followed(evidence)
    found = [decision for one, other in combinations(ranks, 2) for decision in _differences(one, other, ranks)]
    return sorted(found, key=lambda decision: (not decision.stops, not decision.saves))


def own_value(evidence: Evidence, *, skips: bool = False) -> OwnValue | None:
    """Returns a number of its own by which each rank will end training, although the ranks decide alike so far.

    Args:
        evidence: The runs.
        skips: Look for a number by which each rank will skip an optimizer step instead.
    """
    ranks = _followed(evidence)
    steps = _places(ranks, "step")
    for one, other in combinations(ranks, 2):
        first, second = (_merged(record, "values") for record in (one, other))
        # What is decided before the first optimizer step is not learned.
        learned = [place for place in first.keys() & second.keys() if _merged(one, "steps").get(place)]
        for place in sorted(learned):
            condition = condition_at(place)
            if condition is None or condition.names_rank or condition.fails:
                continue
            if (skips_step if skips else ends_training)(condition, steps, place.rpartition(":")[0]):
                for a, b in zip(first[place], second[place], strict=False):
                    for operand in sorted(a.keys() & b.keys()):
                        if _differ(a[operand], b[operand]):
                            where, pair = f"{place} in {condition.function}", (a[operand], b[operand])
                            return OwnValue(where, condition.text, operand, (one.rank, other.rank), pair, skips)
    return None


def deciding_numbers(evidence: Evidence) -> set[float]:
    """Returns the fractional numbers by which rank 0 decides what is kept, when training ends, or the learning rate."""
    ranks = _followed(evidence)[:1]
    steps, saves = _places(ranks, "step"), _places(ranks, "save")
    found = {event["value"] for rank in ranks for event in rank.of_kind("metric of schedule")}
    for place, times in (item for rank in ranks for item in _merged(rank, "values").items()):
        condition, path = condition_at(place), place.rpartition(":")[0]
        if condition is None or condition.fails:
            continue
        inside = any(condition.contains(line) for line in saves if line.startswith(f"{path}:"))
        if inside or condition.keeps_weights or condition.stops(steps, path):
            found |= {value for values in times for value in values.values()}
    return {value for value in found if math.isfinite(value) and not value.is_integer()}


def _differ(first: float, second: float) -> bool:
    """Returns whether numbers differ by more than rounding; those that count something are not meant."""
    if not (math.isfinite(first) and math.isfinite(second)) or (first.is_integer() and second.is_integer()):
        return False
    return abs(first - second) > _ROUNDING * max(abs(first), abs(second))


def _followed(evidence: Evidence) -> Sequence[RankRecord]:
    """Returns the ranks of a run that has recorded the branches of the user's code."""
    if "ranks" not in evidence.runs or not evidence.ranks:
        return []
    run = evidence.longer() if evidence.trained else None
    if run is None or not run.worked:
        # Ranks that wait for each other need not do so for long.
        alone = evidence.runs["single"].seconds if "single" in evidence.runs else 10.0
        seconds = min(evidence.spec.timeout, 10 + 3 * alone)
        run = evidence.run("decisions", interventions={"branches": True}, timeout=seconds)
    return run.ranks


def different_metrics(evidence: Evidence) -> tuple[dict[str, Any], int, list[float]] | None:
    """Returns the first step of a schedule that gets another value on each rank, its number, and the values."""
    steps = [rank.of_kind("metric of schedule") for rank in evidence.ranks]
    for time, events in enumerate(zip(*steps, strict=False), start=1):
        values = [event["value"] for event in events]
        if max(values) - min(values) > _ROUNDING * max(map(abs, values)):
            return events[0], time, values
    return None


def stopping_decision(evidence: Evidence) -> Decision | None:
    """Returns the decision by which a rank ends training alone, if one does."""
    return next((decision for decision in different_decisions(evidence) if decision.stops), None)


def decision_about(evidence: Evidence, place: str) -> Decision | None:
    """Returns the decision by which one of two ranks runs a place of the user's code."""
    return next((decision for decision in different_decisions(evidence) if place and decision.contains(place)), None)


def _differences(one: RankRecord, other: RankRecord, ranks: Sequence[RankRecord]) -> Iterator[Decision]:
    first, second = (_merged(record, "lines") for record in (one, other))
    learned = [_merged(record, "steps") for record in (one, other)]
    steps, saves = _places(ranks, "step"), _places(ranks, "save")
    for place in first.keys() & second.keys():
        condition = condition_at(place)
        if condition is None:
            continue
        path = place.rpartition(":")[0]
        a, b = ([condition.outcome(line) for line in lines[place]] for lines in (first, second))
        time = next((time for time, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        # A rank that never decides otherwise may be asked for its number, and one that decides before the first
        # optimizer step does not ask for what it has learned.
        is_early = not any(steps_before.get(place, 1) for steps_before in learned)
        if time is None or (len(set(a)) == 1 and len(set(b)) == 1 and (len(a) > 1 or is_early)):
            continue
        if condition.names_rank:
            continue
        stops = condition.stops(steps, path)
        inside = any(condition.contains(line) for line in saves if line.startswith(f"{path}:"))
        where = f"{place} in {condition.function}"
        yield Decision(where, condition.text, (one.rank, other.rank), time + 1, stops, inside, condition.lines)


def _places(ranks: Sequence[RankRecord], kind: str) -> set[str]:
    """Returns the lines of the user's code that were in events of a kind."""
    return {place for record in ranks for event in record.of_kind(kind) for place in event.get("stack", ())}


def _merged(record: RankRecord, key: str) -> dict[str, Any]:
    return {place: value for event in record.of_kind("branches") for place, value in event.get(key, {}).items()}
