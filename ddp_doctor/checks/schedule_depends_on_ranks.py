"""LD017: the schedule depends on the number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isclose

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, depends, fault, not_reached, note
from ddp_doctor.records.run import RankRecord

CODE = "LD017"
TITLE = "The schedule depends on the number of ranks"
CAUSE = """\
A scheduler that a library prepares may step once per process for each optimizer step, or its length may be
computed from the loader of one process. On N ranks, warm-up and decay are N times too short or too long. The
loss curve looks plausible, because the schedule still has its shape.
"""
FIX = """\
Compute the length in optimizer steps, and step once:
    steps = epochs * len(prepared_loader) // accumulation
    scheduler.step()    # not prepared, or Accelerator(step_scheduler_with_optimizer=False)
"""
THREADS = ("huggingface/accelerate#2926", "huggingface/accelerate#2318")
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Compares how often schedules step, and the learning rates, on one process and on several."""
    record, count = next(iter(evidence.trained), None), len(evidence.trained)
    if record is None:
        return []
    times, place = _times(record)
    if not times:
        constant = all(len(set(rates)) < 2 for rates in _rates(record).values())
        return [not_reached("No schedule steps.")] if constant else []
    if times == 1:
        return []
    alone = _times(evidence.single)[0] if evidence.single else 0
    if not alone or times != count * alone:
        return [note(f"A schedule steps {times} times per optimizer step.", place=place)]
    once = evidence.run("schedules once", interventions={"step_schedules_once": True})
    message = f"A schedule steps {times} times per optimizer step on {count} ranks, and {alone} on one process."
    if not once.worked:
        return [depends(message, place=place)]
    rates, fixed, single = (_rates(one) for one in (record, once.ranks[0], evidence.single) if one)
    number = next((number for number, found in rates.items() if found != fixed.get(number)), None)
    if number is None:
        return [note(message, place=place)]
    step = next(step for step, (a, b) in enumerate(zip(rates[number], fixed[number], strict=False)) if a != b)
    amount = f"learning rate {rates[number][step]:.3g} instead of {fixed[number][step]:.3g}"
    if _fits(fixed[number], single.get(number, []), count):
        message += f" It is already {count} times shorter on {count} ranks, so it ends too early."
        proof = (
            "With one step of the schedule per optimizer step, the learning rates are those of one process after as "
            "many samples."
        )
        return [fault(message, step, "", amount, place, proof)]
    message += f" It ends after {count} times fewer optimizer steps, unless its length counts those of one process."
    return [depends(message, step, "", amount, place)]


def _times(record: RankRecord) -> tuple[int, str]:
    """Returns how often a schedule steps per optimizer step at most, and where."""
    events = [event for event in record.of_kind("scheduler") if event["step"] > 0]
    counts = Counter((event["scheduler"], event["step"]) for event in events)
    return max(counts.values(), default=0), next((event["place"] for event in events if event["place"]), "")


def _rates(record: RankRecord) -> dict[int, list[float]]:
    """Returns the learning rates of each optimizer's first group, by step."""
    found: dict[int, list[float]] = {}
    for event in record.of_kind("step"):
        found.setdefault(event["optimizer"], []).append(event["lr"][0])
    return found


def _fits(rates: Sequence[float], single: Sequence[float], count: int) -> bool:
    """Returns whether the rates are those of one process after as many samples, and not after as many steps."""
    places = [step for step in range(1, len(rates)) if step * count < len(single)]
    if not places or not rates[0] or not single[0]:
        return False

    def equal(by: int) -> bool:
        return all(isclose(rates[step] / rates[0], single[step * by] / single[0], rel_tol=1e-6) for step in places)

    return equal(count) and not equal(1)
