"""The learning rates of a run: by step, by epoch, and in the part of a schedule that was not trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isclose
from typing import Any

from ddp_doctor.records.run import RankRecord

# A difference of two rates, as a share of the highest one.
_FAR = 0.05
# A rate that one process has this share of the schedule earlier or later: a warm-up of as many optimizer steps on any
# number of ranks moves the rest of a schedule.
_NEARLY = 0.1


def later_difference(record: RankRecord, single: RankRecord | None, times: int, alone: int) -> tuple[int, str] | None:
    """Returns the first optimizer step after those of the run at which a sample has another learning rate, and what.

    Args:
        record: Rank 0.
        single: One process.
        times: How often a schedule steps per optimizer step on several ranks.
        alone: The same on one process, which has as many samples after `times / alone` times as many optimizer steps.
    """
    events = zip(record.of_kind("ahead"), single.of_kind("ahead") if single else [], strict=False)
    for ours, theirs in events:
        # Both have as many samples after as many steps of the schedule.
        first = max(event["calls"] for event in (ours, theirs))
        last = min(event["calls"] + len(event["rates"]) for event in (ours, theirs))
        peak, window = max((*ours["rates"], *theirs["rates"])), int(_NEARLY * last)
        for calls in range(first, last):
            found, expected = (event["rates"][calls - event["calls"]] for event in (ours, theirs))
            place = calls - theirs["calls"]
            near = theirs["rates"][max(0, place - window) : place + window + 1]
            if calls % times == 0 and max(min(near) - found, found - max(near)) > _FAR * peak:
                step = calls // times
                amount = (
                    f"after {step} optimizer steps, {found:.3g} of its base instead of {expected:.3g}, as on one "
                    f"process after {calls // alone}"
                )
                return step, amount
    return None


def first_epoch(record: RankRecord) -> list[dict[str, Any]]:
    """Returns the optimizer steps of the first training epoch."""
    starts = [event["step"] for event in record.training_epochs[1:2]]
    return [event for event in record.of_kind("step") if not starts or event["step"] < starts[0]]


def of_first_epoch(record: RankRecord, *, based: bool) -> dict[int, list[float]]:
    """Returns the learning rates of each optimizer's first group in the first training epoch.

    They are relative to the first rate or, if `based`, to the group's `initial_lr`, the base of a schedule of torch: a
    warm-up that is too short also begins with another rate.
    """
    found: dict[int, list[float]] = {}
    bases: dict[int, float] = {}
    for event in first_epoch(record):
        rate, base = event["lr"][0], event.get("base", [0.0])[0] if based else 0.0
        # A warm-up may begin at 0.
        known = bases.setdefault(event["optimizer"], base or rate or 1.0)
        found.setdefault(event["optimizer"], []).append(rate / known)
    return found


def of_epochs(record: RankRecord | None) -> list[float]:
    """Returns the learning rate of each epoch relative to the first one; empty if it changes within an epoch."""
    starts = [event["step"] for event in record.training_epochs] if record else []
    steps = record.of_kind("step") if record else []
    found = []
    for begin, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        rates = {event["lr"][0] for event in steps if begin <= event["step"] < end}
        if len(rates) != 1:
            return []
        found.append(rates.pop())
    return [round(rate / found[0], 9) for rate in found if found[0]]


def calls_per_step(record: RankRecord) -> tuple[int, str]:
    """Returns how often a schedule steps per optimizer step at most, and where."""
    events = [event for event in record.of_kind("scheduler") if event["step"] > 0]
    counts = Counter((event["scheduler"], event["step"]) for event in events)
    return max(counts.values(), default=0), next((event["place"] for event in events if event["place"]), "")


def rates_of(record: RankRecord) -> dict[int, list[float]]:
    """Returns the learning rates of each optimizer's first group, by step."""
    return _by_optimizer(record.of_kind("step"))


def base_rates(record: RankRecord) -> dict[int, float]:
    """Returns the base of each optimizer's first group, which is a rate that never changes if no schedule has one."""
    steps = record.of_kind("step")
    found: dict[int, float] = {}
    for number, rates in _by_optimizer(steps).items():
        base = next(event.get("base", [0.0])[0] for event in steps if event["optimizer"] == number)
        # Of a single step it is not known whether it is one of a warm-up.
        if base or (len(rates) > 1 and len(set(rates)) == 1):
            found[number] = base or rates[0]
    return found


def _by_optimizer(steps: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for event in steps:
        found.setdefault(event["optimizer"], []).append(event["lr"][0])
    return found


def fits_samples(rates: Sequence[float], single: Sequence[float], count: int) -> bool:
    """Returns whether the rates are those of one process after as many samples, and not after as many steps."""
    places = [step for step in range(1, len(rates)) if step * count < len(single)]
    if not places or not rates[0] or not single[0]:
        return False

    def equal(by: int) -> bool:
        return all(isclose(rates[step] / rates[0], single[step * by] / single[0], rel_tol=1e-6) for step in places)

    return equal(count) and not equal(1)
