"""LD025: a resumed run loses state."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, Verdict, cannot_tell, fault, not_reached, note
from ddp_doctor.records.run import RankRecord, Run

Event = dict[str, Any]

CODE = "LD025"
TITLE = "A resumed run loses state"
CAUSE = """\
A checkpoint that lacks the scheduler, the averaged weights or the optimizer resumes with their initial values, and one
of rank 0 has its own position in the data and its own generators, with which all ranks continue. The loss has a small
bump and recovers, so that the difference is attributed to chance.
"""
WRONG = """\
torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, path)
# the scheduler, the scaler and the average of the weights begin again
"""
FIX = """\
Save and load everything that changes in a step, and what each rank has for itself in one file per rank:
    state = {'model': model, 'optimizer': optimizer, 'scheduler': scheduler, 'scaler': scaler}
    torch.save({key: part.state_dict() for key, part in state.items()}, path)
"""
THREADS = ("PolymathicAI/the_well#77", "atomistic-machine-learning/schnetpack#785")
STRUCTURAL = False
_POSITIONS = {"epoch", "epochs", "step", "steps", "iteration", "iter", "it", "iter_num", "global_step", "start_epoch"}
# Their next rate depends on the last one, which the optimizer's state contains.
_FROM_LAST_RATE = {"ExponentialLR", "MultiplicativeLR", "ConstantLR"}
_LOADS = re.compile(r"\.(load_state_dict|load_state|load_checkpoint|load_from_checkpoint|restore)\(")
_RESTORED = re.compile(r"""([\w.\[\]()'"]+)\.load_state_dict\(""")
# A schedule is brought to its position by `last_epoch`, by a step with a number, or by a loop that only steps it.
_POSITIONED = re.compile(r"last_epoch|sched\w*\.step\([^)]|:\s*\w*sched\w*\.step\(\)", re.IGNORECASE)
# Names of what is no schedule.
_KNOWN = re.compile(
    r"opt|model|net|module|ddp|ema|average|scaler|teacher|student|(?:en|de)coder|backbone|head|critic|gen"
)
_AVERAGE = "with tensors of the weights' shapes changes in each step, such as an average of the weights"


def check(evidence: Evidence) -> list[Finding]:
    """Compares what a program saves with the state that changes, and with what it has restored after a restart."""
    found = next((found for record in evidence.trained if (found := _not_saved(record))), None)
    if found and found.verdict is Verdict.FAULT:
        return [found]
    if not any(rank.of_kind("save", "saved") for rank in evidence.ranks):
        return [not_reached("The program saves no checkpoint.")] if evidence.trained else []
    run, why = _start_again(evidence)
    if run is None:
        reason = f"The checkpoint lacks no known state, but no resumed run was examined: {why}"
        return [found or cannot_tell(reason)]
    lost = _not_restored(evidence.trained, run.ranks)
    if lost and lost.verdict is Verdict.CANNOT_TELL:
        return [found or lost]
    return [lost] if lost else []


def _not_saved(record: RankRecord) -> Finding | None:
    """Returns a finding of state that changes, and that is in no file."""
    full = _checkpoints(record)
    if not full:
        return None
    event, events = full[-1], record.of_kind("saved")
    where = event["step"], "", "", _place(event, record)
    tensors = {digest for one in events for digest in one["tensors"]}
    for copy in _averages(record, event):
        missing = [digest for digest in copy["digests"] if digest not in tensors]
        if 2 * len(missing) > len(copy["digests"]):
            return fault(f"A {copy['name']} {_AVERAGE}, but the checkpoint does not contain it.", *where)
    # A checkpoint may consist of several files.
    saved = sum({one["file"]: one["optimizers"] for one in events}.values())
    if saved < event["stateful"]:
        return fault(f"The checkpoint contains the state of {saved} of {event['stateful']} optimizers.", *where)
    keys = {key for one in events for key in one["keys"]}
    moves = len({tuple(step["lr"]) for step in record.of_kind("step")}) > 1
    if not event["schedulers"] or not moves or "last_epoch" in keys:
        return None
    name, source = event["schedulers"][0], _source(record)
    message = f"The checkpoint does not contain the state of the {name}"
    if not keys & _POSITIONS:
        # Code that cannot be read may load it.
        verdict = fault if not source or _LOADS.search(source) else note
        return verdict(f"{message}, nor an epoch or a step.", *where)
    if name not in _FROM_LAST_RATE and _loads_without_schedule(source):
        return fault(f"{message}, and the code that loads it starts the schedule from its first step.", *where)
    return note(f"{message}, but a position from which it can be computed.", *where)


def _checkpoints(record: RankRecord) -> list[Event]:
    """Returns the events that saved the weights and an optimizer: weights alone are no checkpoint to resume from."""
    events = record.of_kind("saved")
    tensors = {digest for event in events for digest in event["tensors"]}
    return [event for event in events if event["optimizers"] and set(event["weights"]) <= tensors]


def _averages(record: RankRecord, event: Event) -> Iterator[Event]:
    """Yields what has tensors of the weights' shapes and changes in each step, when a checkpoint was saved."""
    for copy in event["copies"]:
        changes = [survey["digests"].get(copy["id"]) for survey in record.of_kind("copies")][1:]
        if len(set(changes)) > 1 and len(set(changes)) == len(changes) and None not in changes:
            yield copy


def _source(record: RankRecord) -> str:
    """Returns the user's code that trains and saves, as far as it can be read."""
    events = record.of_kind("step", "save", "saved")
    places = [place for event in events for place in [*event.get("stack", ()), event["place"]] if place]
    found = ""
    for path in sorted({place.partition(" in ")[0].rpartition(":")[0] for place in places}):
        with suppress(OSError, ValueError):
            found += f"{Path(path).read_text()}\n"
    return found


def _loads_without_schedule(source: str) -> bool:
    """Returns whether code restores an optimizer, and neither restores a schedule nor brings it to its position."""
    restored = [name.lower() for name in _RESTORED.findall(source)]
    # What has another name may be a schedule.
    others = [name for name in restored if "sched" in name or not _KNOWN.search(name)]
    return not others and any("opt" in name for name in restored) and not _POSITIONED.search(source)


def _start_again(evidence: Evidence) -> tuple[Run | None, str]:
    """Ends a program after its first checkpoint, and starts it again; returns this run, or why there is none."""
    if evidence.deterministic is False:
        return None, "two runs of the same code give different weights."
    if not any(map(_checkpoints, evidence.trained)):
        return None, "no file has the weights and an optimizer."
    interrupted = evidence.run("interrupted", interventions={"until_saved": True})
    if not interrupted.worked:
        return None, f"a run that ends after its checkpoint fails ({interrupted.short_reason})."
    run = evidence.run("started again", interventions={"started_again": True, "resume_by": _option(interrupted)})
    if not run.worked:
        return None, f"started again after its checkpoint, the program fails ({run.short_reason})."
    return run, ""


def _option(run: Run) -> list[str]:
    """Returns the option with which a program resumes, and the checkpoint that it takes; nothing if none is known."""
    from ddp_doctor.probes.options import FOLDER, NOTHING, OPTIONS

    path = run.folder / OPTIONS
    files = [event["file"] for record in run.ranks for event in _checkpoints(record)] if path.exists() else []
    if not files:
        return []
    option, kind = json.loads(path.read_text())
    return [option] if kind == NOTHING else [option, str(Path(files[-1]).parent) if kind == FOLDER else files[-1]]


def _not_restored(firsts: Sequence[RankRecord], ranks: Sequence[RankRecord]) -> Finding | None:
    """Returns a finding of state that a resumed program lacks, or why that is not known."""
    begins = [record.of_kind("continued") for record in ranks]
    reason = "The checkpoint lacks no known state, but no resumed run was examined: started again"
    if not all(begins):
        return cannot_tell(f"{reason} after its checkpoint, the program takes no step.")
    saved = _resumed_from(_checkpoints(firsts[0]), begins[0][0]["weights"])
    if saved is None:
        return cannot_tell(f"{reason}, the program does not resume from its checkpoint; it may need an option.")
    place = _place(next(iter(ranks[0].of_kind("load_state_dict")), saved), ranks[0])
    compared = firsts[0], ranks[0], saved["step"]
    if message := _lost(firsts[0], ranks, begins, saved) or _other_rate(*compared) or _repeated_epoch(*compared):
        return fault(message, saved["step"], place=place)
    message, is_fault = _taken_from_rank_0(firsts, ranks, saved["step"])
    return (fault if is_fault else note)(message, saved["step"], place=place) if message else None


def _place(event: Event, record: RankRecord) -> str:
    """Returns the user's place of an event, or, if a Trainer saves and loads, that of what is saved."""
    events = [event, *record.of_kind("scheduler", "optimizer")]
    return next((one["place"] for one in events if one["place"]), "")


def _resumed_from(events: Sequence[Event], begun: Sequence[str]) -> Event | None:
    """Returns the last checkpoint with the weights before the first step, or None.

    Of the weights that change between checkpoints, half are enough: a momentum encoder has already moved in the
    forward pass of this step.
    """
    known = [event for event in events if len(event["weights"]) == len(begun)]
    places = range(len(begun))
    moving = [place for place in places if len({event["weights"][place] for event in known}) > 1]
    least = (len(moving) + 1) // 2 if moving else len(begun)
    found = [
        event for event in known if sum(event["weights"][place] == begun[place] for place in moving or places) >= least
    ]
    return found[-1] if found else None


def _lost(first: RankRecord, ranks: Sequence[RankRecord], begins: Sequence[Sequence[Event]], saved: Event) -> str:
    """Returns which state of an optimizer or an average a checkpoint has, and a resumed run has not."""
    for record, surveys in zip(ranks, begins, strict=True):
        for number, state in enumerate(saved["states"]):
            if state and surveys[0]["states"][number : number + 1] == [""] and not _is_sharded(first, number):
                return f"The checkpoint has the state of an optimizer, but rank {record.rank} does not restore it."
        # What was read from the checkpoint, and does not change, is not the average.
        changing = [
            sorted(values) for key, values in surveys[0]["copies"].items() if surveys[-1]["copies"].get(key) != values
        ]
        for copy in _averages(first, saved) if len(surveys) > 1 else ():
            if sorted(copy["digests"]) not in changing:
                return f"A {copy['name']} {_AVERAGE}, but a resumed run begins with other values of it."
    return ""


def _is_sharded(record: RankRecord, optimizer: int) -> bool:
    """Returns whether each rank has the state of its own part of the weights only."""
    events = [event for event in record.of_kind("step") if event["optimizer"] == optimizer]
    return any(event["sharded"] or event["name"].startswith("Zero") for event in events)


def _other_rate(first: RankRecord, resumed: RankRecord, step: int) -> str:
    """Compares the learning rates after a checkpoint; that of its first step is in the state of the optimizer."""
    for number, (expected, found) in enumerate(
        zip(_steps_of_epoch(first, step), _steps_of_epoch(resumed), strict=False)
    ):
        if expected["optimizer"] == found["optimizer"] and expected["lr"] != found["lr"]:
            return (
                f"After {step} steps, a resumed run takes its step {number + 1} with the learning rate "
                f"{found['lr'][0]:.3g} instead of {expected['lr'][0]:.3g}."
            )
    return ""


def _steps_of_epoch(record: RankRecord, first: int = 0) -> list[Event]:
    """Returns the steps from this one on, until another epoch begins or a schedule follows a metric."""
    found: list[Event] = []
    for event in record.of_kind("step", "epoch", "metric of schedule"):
        if event["kind"] != "step" and found:
            break
        if event["kind"] == "step" and event["step"] >= first:
            found.append(event)
    return found


def _repeated_epoch(first: RankRecord, resumed: RankRecord, step: int) -> str:
    """Compares the epoch that is trained after a checkpoint, as the sampler is told it."""
    before = [event["number"] for event in first.of_kind("set_epoch") if event["step"] < step][-1:]
    after = [event["number"] for event in first.of_kind("set_epoch") if event["step"] == step][:1]
    again = [event["number"] for event in resumed.of_kind("set_epoch")][:1]
    if not before or not after or again != before or after == before:
        return ""
    return (
        f"The checkpoint is saved at the end of epoch {before[0]}, but a resumed run trains epoch {again[0]} again, "
        "with the same order of samples."
    )


def _taken_from_rank_0(firsts: Sequence[RankRecord], resumed: Sequence[RankRecord], step: int) -> tuple[str, bool]:
    """Returns what the ranks had each for itself, and all of them get from rank 0 in a resumed run; is it a fault?"""
    before, after = [_first_call(record, step) for record in firsts], [_first_call(record, 0) for record in resumed]
    first, again = before[0], after[0]
    for rank, (own, other) in enumerate(zip(before[1:], after[1:], strict=False), 1):
        if not (first and again and own and other):
            continue
        calls = first, again, own, other
        text = f"At the first step after the checkpoint of step {step}, rank {rank} continues with "
        # If rank 0 continues with another input, a small one, such as a length, may be equal by chance.
        if first["inputs"] == again["inputs"] and any(
            _is_taken(*values) for values in zip(*(call["inputs"] for call in calls), strict=False)
        ):
            return (
                f"{text}an input of rank 0, such as its samples or the state of its network: the checkpoint has the "
                "position or the state of rank 0 alone, and all ranks load it."
            ), True
        for name in first["generators"]:
            if _is_taken(*(call["generators"][name] for call in calls)):
                text += f"the state of rank 0's generator of {name}, so that all ranks draw the same random numbers."
                # Dropout alone leaves the inputs as they are.
                return text, own["inputs"] != other["inputs"]
    return "", False


def _first_call(record: RankRecord, step: int) -> Event | None:
    """Returns the first forward pass of a step, with gradients and with all that is compared."""
    events = (event for event in record.of_kind("forward") if event["step"] == step and event.get("generators"))
    return next(events, None)


def _is_taken(first: str, again: str, own: str, other: str) -> bool:
    """Returns whether rank 0 continues with its own value, and another rank with that of rank 0."""
    return first == again == other != own
