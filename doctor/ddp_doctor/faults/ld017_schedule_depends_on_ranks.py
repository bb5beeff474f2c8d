"""LD017: the schedule depends on the number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import skipping_rank
from ddp_doctor.faults.ld004_sampler_replaced import split_twice
from ddp_doctor.findings import Finding, Verdict, cannot_tell, depends, fault, not_reached, note
from ddp_doctor.records.run import RankRecord

Event = dict[str, Any]

CODE = "LD017"
TITLE = "The schedule depends on the number of ranks"
CAUSE = """\
A scheduler that a library prepares may step once per process for each optimizer step, or its length may be
computed from the loader of one process. On N ranks, warm-up and decay are N times too short or too long. The
loss curve looks plausible, because the schedule still has its shape. A learning rate that is scaled with the number
of ranks may be scaled twice: by the number of ranks, and by a batch size that already contains it.
"""
WRONG = """\
scheduler = OneCycleLR(optimizer, max_lr, total_steps=epochs * len(dataset) // batch_size)
# The prepared scheduler steps once per process.
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
"""
FIX = """\
Compute the length in optimizer steps, and step once:
    steps = epochs * len(prepared_loader) // accumulation
    scheduler.step()    # not prepared, or Accelerator(step_scheduler_with_optimizer=False)
If Accelerate steps the prepared schedule once per process, use the length of the loader before it is prepared.
Scale a learning rate once: by the number of ranks, or by the global batch.
"""
THREADS = ("huggingface/accelerate#2926", "huggingface/accelerate#2318")
STRUCTURAL = True
# A program without epochs has more steps than are compared.
_MOST_STEPS = 12
# Of the difference between the rates after as many samples, and after as many times more.
_NEAR = 0.25
# A difference of two rates, as a share of the highest one.
_FAR = 0.05
# A rate that one process has this share of the schedule earlier or later: a warm-up of as many optimizer steps on any
# number of ranks moves the rest of a schedule.
_NEARLY = 0.1


def check(evidence: Evidence) -> list[Finding]:
    """Compares how often schedules step, and the learning rates, on one process and on several."""
    record, count = next(iter(evidence.trained), None), len(evidence.trained)
    if record is None:
        return []
    if found := _scaled_twice(evidence, record, count):
        return [found]
    times, place = _calls_per_step(record)
    if not times and all(len(set(rates)) < 2 for rates in _rates(record.of_kind("step")).values()):
        return [not_reached("No schedule steps.")]
    if reason := _no_common_length(evidence, record, times):
        return [cannot_tell(reason)]
    if times < 2:
        return _by_rates(evidence, record, count)
    alone, _ = _calls_per_step(evidence.single)
    if not alone or times != count * alone:
        return [note(f"A schedule steps {times} times per optimizer step.", place=place)]
    once = evidence.run("schedules once", interventions={"step_schedules_once": True})
    message = f"A schedule steps {times} times per optimizer step on {count} ranks, and {alone} on one process."
    if not once.worked:
        return [depends(message, place=place)]
    rates, fixed, single = (_rates(one.of_kind("step")) for one in (record, once.ranks[0], evidence.single) if one)
    number = next((number for number, found in rates.items() if found != fixed.get(number)), None)
    if number is None:
        return [note(message, place=place)]
    step = next(step for step, (a, b) in enumerate(zip(rates[number], fixed[number], strict=False)) if a != b)
    amount = f"learning rate {rates[number][step]:.3g} instead of {fixed[number][step]:.3g}"
    if _fits_samples(fixed[number], single.get(number, []), count):
        message += f" It is already {count} times shorter on {count} ranks, so it ends too early."
        proof = (
            "With one step of the schedule per optimizer step, the learning rates are those of one process after as "
            "many samples."
        )
        return [fault(message, step, "", amount, place, proof)]
    if _of_epochs(once.ranks[0]) == _of_epochs(evidence.single) != _of_epochs(record):
        message += " It steps after each epoch, and an epoch has as many samples on any number of ranks."
        proof = "With one step of the schedule per epoch, the learning rates are those of one process."
        return [fault(message, step, "", amount, place, proof)]
    by_rates = _by_rates(evidence, record, count, based=True)
    if not by_rates:
        # As with a schedule that Accelerate steps.
        same = note(f"{message} Each sample has the learning rate that it has on one process.", place=place)
        later = _later_difference(record, evidence.single, times, alone)
        message += " It is shorter on several ranks, so it ends too early."
        return [fault(message, later[0], "", later[1], place) if later else same]
    if all(finding.verdict is not Verdict.CANNOT_TELL for finding in by_rates):
        return by_rates
    message += f" It ends after {count} times fewer optimizer steps, unless its length counts those of one process."
    return [depends(message, step, "", amount, place)]


def _scaled_twice(evidence: Evidence, record: RankRecord, count: int) -> Finding | None:
    """Returns a finding if the learning rate grows with the square of the number of ranks."""
    alone = _base_rates(evidence.single)
    for number, rate in _base_rates(record).items():
        single = alone.get(number, 0.0)
        if single and isclose(rate, single * count**2, rel_tol=1e-6):
            message = f"The learning rate is scaled twice: on {count} ranks it is {count**2} times that of one process."
            amount = f"learning rate {rate:.3g} on {count} ranks, {single:.3g} on one process"
            return fault(message, 0, "", amount, record.of_kind("step")[0]["place"])
    return None


def _no_common_length(evidence: Evidence, record: RankRecord, times: int) -> str:
    """Returns why the ranks and one process do not step a schedule alike in any case, or nothing."""
    if skipping_rank(evidence) is not None:
        return "A rank skips optimizer steps, so that its schedule steps at other samples."
    if split_twice(evidence):
        return "The samples are split twice (LD004), so the length of an epoch is not the right one."
    if times < 2 and _resumed(record, evidence.single):
        return "The program resumes from a checkpoint, at another position of its schedule on one process."
    return ""


def _resumed(record: RankRecord, single: RankRecord | None) -> bool:
    """Returns whether weights are loaded before the first step, and its learning rate is not that of one process."""
    if single is None or not any(event["step"] == 0 for event in record.of_kind("load_state_dict")):
        return False
    first = [one.of_kind("step")[:1] for one in (record, single)]
    return all(first) and first[0][0]["lr"] != first[1][0]["lr"] and first[0][0]["base"] == first[1][0]["base"]


def _by_rates(evidence: Evidence, record: RankRecord, count: int, *, based: bool = False) -> list[Finding]:
    """Compares the learning rates in the first epoch with those of one process after as many steps, or samples."""
    if evidence.single is None:
        return []
    ours, short = (_of_first_epoch(one, based=based) for one in (record, evidence.single))
    changing = [number for number in ours if len({*ours[number]}) > 1 or len({*short.get(number, ())}) > 1]
    if not changing:
        return []
    # One process comes to the samples of the ranks after as many times more steps.
    most = min(len(_first_epoch(record)), _MOST_STEPS) * count**2 + 2
    one = evidence.single
    if len(_first_epoch(one)) < most:
        longer = evidence.run("a longer epoch", world_size=1, steps=most)
        if not longer.worked:
            return [cannot_tell(f"A longer epoch of one process fails ({longer.short_reason}).")]
        one = longer.ranks[0]
    alone = _of_first_epoch(one, based=based)
    compared = [_compare(ours[number][:_MOST_STEPS], alone.get(number, []), count) for number in changing]
    if not any(steps for steps, _ in compared):
        return [cannot_tell("An epoch has too few steps to compare the learning rates.")]
    found = next((found for _, found in compared if found), None)
    return [replace(found, place=record.of_kind("step")[found.step or 0]["place"])] if found else []


def _compare(rates: Sequence[float], alone: Sequence[float], count: int) -> tuple[int, Finding | None]:
    """Returns how many steps can be compared, and the first that differs."""
    # A schedule may count from 1.
    steps = [
        step for step in range(1, len(rates)) if step * count + 1 < len(alone) and bool(rates[0]) == bool(alone[0])
    ]
    for step in steps:
        found, expected = rates[step], [alone[step], alone[step * count]]
        # Between as many steps and as many samples.
        near = alone[step : step * count + 2]
        if min(near) * (1 - 1e-5) - 1e-9 <= found <= max(near) * (1 + 1e-5) + 1e-9:
            continue
        amount = f"{found:.4g} of the first learning rate instead of {expected[1]:.4g}"
        steps_taken = f"{step} optimizer step{'s' if step > 1 else ''}"
        message = (
            f"After {steps_taken} on {count} ranks, the learning rate is {found:.4g} of the first one. On one process, "
            f"it is {expected[0]:.4g} after {steps_taken}, and {expected[1]:.4g} after as many samples."
        )
        if step * count**2 >= len(alone) or not _is_far(rates, alone, count):
            return len(steps), depends(message, step, "", amount)
        message += (
            f" The rate on {count} ranks is that of one process after {count} times as many samples: the schedule "
            "advances once per process."
        )
        return len(steps), fault(message, step, "", amount)
    return len(steps), None


def _is_far(rates: Sequence[float], alone: Sequence[float], count: int) -> bool:
    """Returns whether the rates are those of one process after as many times as many samples, in each known step.

    The lengths of two schedules are whole numbers of batches, so their rates are not equal.
    """
    far = [
        (rates[step], alone[step * count], alone[step * count**2 : (step * count + count) * count])
        for step in range(1, len(rates))
        if step * count**2 < len(alone)
    ]
    return bool(far) and all(
        max(min(late) - found, found - max(late)) <= _NEAR * min(abs(now - rate) for rate in late)
        for found, now, late in far
    )


def _rates(steps: Iterable[Event]) -> dict[int, list[float]]:
    """Returns the learning rates of each optimizer's first group, by step."""
    found: dict[int, list[float]] = {}
    for event in steps:
        found.setdefault(event["optimizer"], []).append(event["lr"][0])
    return found


def _bases(steps: Iterable[Event]) -> dict[int, float]:
    """Returns the `initial_lr` of each optimizer's first group, the base of a schedule of torch; 0 without one."""
    found: dict[int, float] = {}
    for event in steps:
        found.setdefault(event["optimizer"], event.get("base", [0.0])[0])
    return found


def _base_rates(record: RankRecord | None) -> dict[int, float]:
    """Returns the base of each optimizer's first group, which is a rate that never changes if no schedule has one."""
    steps = record.of_kind("step") if record else []
    rates, bases = _rates(steps), _bases(steps)
    # Of a single step it is not known whether it is one of a warm-up.
    constant = {number: found[0] for number, found in rates.items() if len(found) > 1 and len(set(found)) == 1}
    return constant | {number: base for number, base in bases.items() if base}


def _calls_per_step(record: RankRecord | None) -> tuple[int, str]:
    """Returns how often a schedule steps per optimizer step at most, and where."""
    events = [event for event in record.of_kind("scheduler") if event["step"] > 0] if record else []
    counts = Counter((event["scheduler"], event["step"]) for event in events)
    return max(counts.values(), default=0), next((event["place"] for event in events if event["place"]), "")


def _first_epoch(record: RankRecord) -> list[Event]:
    """Returns the optimizer steps of the first training epoch."""
    starts = [event["step"] for event in record.training_epochs[1:2]]
    return [event for event in record.of_kind("step") if not starts or event["step"] < starts[0]]


def _of_first_epoch(record: RankRecord, *, based: bool) -> dict[int, list[float]]:
    """Returns the learning rates in the first epoch, relative to their base if `based`, or else to the first rate.

    A warm-up that is too short also begins with another rate, and a warm-up may begin at 0.
    """
    steps = _first_epoch(record)
    bases = _bases(steps) if based else {}
    return {
        number: [rate / (bases.get(number) or rates[0] or 1.0) for rate in rates]
        for number, rates in _rates(steps).items()
    }


def _of_epochs(record: RankRecord | None) -> list[float]:
    """Returns the learning rate of each epoch relative to the first one; empty if it changes within an epoch."""
    starts = [event["step"] for event in record.training_epochs] if record else []
    steps = record.of_kind("step") if record else []
    found = []
    for begin, end in zip(starts, [*starts[1:], len(steps)], strict=False):
        rates = {event["lr"][0] for event in steps if begin <= event["step"] < end}
        if len(rates) != 1:
            return []
        found.append(rates.pop())
    return [round(rate / found[0], 9) for rate in found if found[0]]


def _fits_samples(rates: Sequence[float], single: Sequence[float], count: int) -> bool:
    """Returns whether the rates are those of one process after as many samples, and not after as many steps."""
    places = [step for step in range(1, len(rates)) if step * count < len(single)]
    if not places or not rates[0] or not single[0]:
        return False

    def equal(by: int) -> bool:
        return all(isclose(rates[step] / rates[0], single[step * by] / single[0], rel_tol=1e-6) for step in places)

    return equal(count) and not equal(1)


def _later_difference(record: RankRecord, single: RankRecord | None, times: int, alone: int) -> tuple[int, str] | None:
    """Returns the first optimizer step after those of the run at which a sample has another learning rate, and what.

    Args:
        record: Rank 0.
        single: One process.
        times: How often a schedule steps per optimizer step on several ranks.
        alone: The same on one process, which has as many samples after `times / alone` times as many optimizer steps.
    """
    for ours, theirs in zip(record.of_kind("ahead"), single.of_kind("ahead") if single else [], strict=False):
        # Both have as many samples after as many steps of the schedule.
        first = max(event["calls"] for event in (ours, theirs))
        last = min(event["calls"] + len(event["rates"]) for event in (ours, theirs))
        peak, window = max((*ours["rates"], *theirs["rates"])), int(_NEARLY * last)
        for calls in (calls for calls in range(first, last) if calls % times == 0):
            place = calls - theirs["calls"]
            found, expected = ours["rates"][calls - ours["calls"]], theirs["rates"][place]
            near = theirs["rates"][max(0, place - window) : place + window + 1]
            if max(min(near) - found, found - max(near)) > _FAR * peak:
                step = calls // times
                amount = f"after {step} optimizer steps, {found:.3g} of its base instead of {expected:.3g}, as on one "
                return step, f"{amount}process after {calls // alone}"
    return None
