"""LD017: the schedule depends on the number of ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isclose

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import skipping_rank
from ddp_doctor.evidence.order import Event
from ddp_doctor.evidence.requirements import optimizer_steps
from ddp_doctor.faults.ld004_sampler_replaced import split_twice
from ddp_doctor.findings import Finding, Verdict, cannot_tell, depends, fault, not_reached, note
from ddp_doctor.records.run import RankRecord

TITLE = "The schedule depends on the number of ranks"
CAUSE = """\
A scheduler that a library prepares may step once per process for each optimizer step, its length may be that of another
loader, or a learning rate is scaled with the number of ranks twice. The schedule still has its shape.
"""
WRONG = """\
scheduler = OneCycleLR(optimizer, max_lr, total_steps=epochs * len(prepared_loader))
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)    # steps once per process
"""
FIX = """\
Compute the length in optimizer steps, and step once; use the length of the undivided loader if each process steps:
    scheduler.step()    # not prepared, or Accelerator(step_scheduler_with_optimizer=False)
"""
THREADS = ("huggingface/accelerate#2926", "huggingface/accelerate#2318")
NEEDS = (optimizer_steps,)
# Steps of an epoch that are compared; of a program without epochs, as many as a short epoch has.
_MOST_STEPS = 12


def check(evidence: Evidence) -> list[Finding]:
    """Compares how often schedules step, and the learning rates, on one process and on several."""
    record, count = evidence.trained[0], len(evidence.trained)
    if found := _scaled_twice(evidence, record, count):
        return [found]
    times, place = _calls_per_step(record)
    if not times and all(len(set(rates)) < 2 for rates in _rates(record.of_kind("step")).values()):
        return [not_reached("No schedule steps.")]
    if skipping_rank(evidence) is not None or split_twice(evidence):
        return [cannot_tell("The ranks and one process do not train on the same samples, so no rates were compared.")]
    return _by_rates(evidence, record, count) if times < 2 else [_by_calls(evidence, record, count, times, place)]


def _by_calls(evidence: Evidence, record: RankRecord, count: int, times: int, place: str) -> Finding:
    """Compares schedules that step several times per optimizer step, as those that Accelerate prepares."""
    alone, single = _calls_per_step(evidence.single)[0], evidence.single
    message = f"A schedule steps {times} times per optimizer step on {count} ranks, and {alone} times on one process."
    if single is None or times != count * alone:
        return note(message, place=place)
    rates = _of_epochs(record), _of_epochs(single)
    if all(rates) and rates[0] != rates[1]:
        # An epoch has as many samples on any number of ranks.
        return fault(f"{message} It steps after each epoch, and ends too early.", place=place)
    # A warm-up may be that of one process, and what follows it is not.
    longer = evidence.run("a longer epoch of the ranks", steps=_MOST_STEPS)
    found = _by_rates(evidence, longer.ranks[0] if longer.worked else record, count)
    if not found or found[0].verdict is Verdict.CANNOT_TELL:
        return note(f"{message} Its length must count the steps of one process, or it ends too early.", place=place)
    return fault(f"{message} It is also shorter, so it ends too early. {found[0].message}", found[0].step, place=place)


def _scaled_twice(evidence: Evidence, record: RankRecord, count: int) -> Finding | None:
    """Returns a finding if the learning rate grows with the square of the number of ranks."""
    alone = _base_rates(evidence.single)
    for number, rate in _base_rates(record).items():
        single = alone.get(number, 0.0)
        if single and isclose(rate, single * count**2, rel_tol=1e-6):
            message = f"The learning rate is scaled twice: on {count} ranks it is {count**2} times that of one process."
            return fault(message, 0, place=record.of_kind("step")[0]["place"])
    return None


def _by_rates(evidence: Evidence, record: RankRecord, count: int) -> list[Finding]:
    """Compares the learning rates in the first epoch with those of one process after as many steps, or samples."""
    one = evidence.single
    ours, short = _of_first_epoch(record), _of_first_epoch(one) if one else {}
    changing = [number for number in ours if len({*ours[number]}) > 1 or len({*short.get(number, ())}) > 1]
    if not changing:
        return []
    if one is None:
        return [cannot_tell("The program did not run on one process, so its rates there are not known.")]
    # One process comes to the samples of the ranks after as many times more steps.
    limit = _MOST_STEPS if record.training_epochs else evidence.spec.steps
    most = min(len(_first_epoch(record)), limit) * count**2 + 2
    if len(_first_epoch(one)) < most:
        # Two epochs are run, and a program without epochs has all its steps in the first one.
        steps = most if record.training_epochs[1:] else (most + 1) // 2
        longer = evidence.run("a longer epoch", world_size=1, steps=steps)
        one = longer.ranks[0] if longer.worked else one
    alone, places = _of_first_epoch(one), [event["place"] for event in record.of_kind("step")]
    compared = [_compare(ours[number][:limit], alone.get(number, []), count) for number in changing]
    found = min(filter(None, compared), key=lambda one: list(Verdict).index(one.verdict), default=None)
    return [replace(found, place=places[found.step or 0])] if found else []


def _compare(rates: Sequence[float], alone: Sequence[float], count: int) -> Finding | None:
    """Returns the first step whose rate differs, or why none can be compared."""
    # A schedule may count from 1.
    same_start = bool(rates) and bool(alone) and bool(rates[0]) == bool(alone[0])
    steps = [step for step in range(1, len(rates)) if same_start and step * count + 1 < len(alone)]
    for step in steps:
        # Between as many steps and as many samples.
        found, now = rates[step], step * count
        if _is_among(found, alone[step : now + 2]):
            continue
        message = (
            f"After {step} optimizer steps on {count} ranks, the learning rate is {found:.4g} of the first one, and on "
            f"one process {alone[step]:.4g} after as many steps and {alone[now]:.4g} after as many samples."
        )
        if _is_among(found, alone[now + 2 :]):
            return fault(f"{message} The schedule advances once per process.", step)
        return depends(message, step)
    return None if steps else cannot_tell("An epoch has too few steps to compare the learning rates.")


def _is_among(rate: float, rates: Sequence[float]) -> bool:
    """Returns whether a rate is between the lowest and the highest of others, up to rounding."""
    return bool(rates) and min(rates) * (1 - 1e-5) - 1e-9 <= rate <= max(rates) * (1 + 1e-5) + 1e-9


def _rates(steps: Sequence[Event], key: str = "lr") -> dict[int, list[float]]:
    """Returns the learning rates of each optimizer's first group by step; with `base`, those that a schedule scales."""
    found: dict[int, list[float]] = {}
    for event in steps:
        found.setdefault(event["optimizer"], []).append(event.get(key, [0.0])[0])
    return found


def _base_rates(record: RankRecord | None) -> dict[int, float]:
    """Returns the base of each optimizer's first group, which is a rate that never changes if no schedule has one."""
    steps = record.of_kind("step") if record else []
    # Of a single step it is not known whether it is one of a warm-up.
    constant = {number: found[0] for number, found in _rates(steps).items() if len(found) > 1 and len({*found}) == 1}
    return constant | {number: bases[0] for number, bases in _rates(steps, "base").items() if bases[0]}


def _calls_per_step(record: RankRecord | None) -> tuple[int, str]:
    """Returns how often a schedule steps per optimizer step at most, and where."""
    events = [event for event in record.of_kind("scheduler") if event["step"] > 0] if record else []
    counts = Counter((event["scheduler"], event["step"]) for event in events)
    return max(counts.values(), default=0), next((event["place"] for event in events if event["place"]), "")


def _first_epoch(record: RankRecord) -> list[Event]:
    """Returns the optimizer steps of the first training epoch."""
    starts = [event["step"] for event in record.training_epochs[1:2]]
    return [event for event in record.of_kind("step") if not starts or event["step"] < starts[0]]


def _of_first_epoch(record: RankRecord) -> dict[int, list[float]]:
    """Returns the learning rates in the first epoch, relative to the first one; a warm-up may begin at 0."""
    rates = _rates(_first_epoch(record))
    return {number: [rate / (found[0] or 1.0) for rate in found] for number, found in rates.items()}


def _of_epochs(record: RankRecord) -> list[float]:
    """Returns the learning rate of each epoch relative to the first one; empty if it changes within an epoch."""
    starts, steps = [event["step"] for event in record.training_epochs], record.of_kind("step")
    found = []
    for begin, end in zip(starts, [*starts[1:], len(steps)], strict=False):
        rates = {event["lr"][0] for event in steps if begin <= event["step"] < end}
        if len(rates) != 1:
            return []
        found.append(rates.pop())
    return [round(rate / found[0], 9) for rate in found if found[0]]
