"""LD025: a resumed run loses state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.restarts import averages, checkpoints, not_restored
from ddp_doctor.evidence.sources import loads_state, loads_without_schedule
from ddp_doctor.findings import Finding, Verdict, cannot_tell, fault, listed, not_reached, note
from ddp_doctor.records.run import RankRecord

_POSITIONS = {"epoch", "epochs", "step", "steps", "iteration", "iter", "it", "iter_num", "global_step", "start_epoch"}
# Their next rate depends on the last one, which the optimizer's state contains.
_FROM_LAST_RATE = {"ExponentialLR", "MultiplicativeLR", "ConstantLR"}
_RUNS = ("whole", "save", "resume")

CODE = "LD025"
TITLE = "A resumed run loses state"
CAUSE = """\
A checkpoint that lacks the scheduler, the scaler, the averaged weights or the optimizer resumes with their
initial values. The learning rate jumps, moments are zero, or training continues from averaged weights. The
loss has a small bump and recovers, so that the difference is attributed to chance. A checkpoint that rank 0
writes has its own position in the data, recurrent state and generators. If all ranks load them, they continue
with the same samples or random numbers.
"""
WRONG = """\
torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, path)
# the scheduler, the scaler and the average of the weights begin again
"""
FIX = """\
Save and load everything that changes in a step:
    state = {'model': model, 'optimizer': optimizer, 'scheduler': scheduler, 'scaler': scaler}
    torch.save({key: part.state_dict() for key, part in state.items()}, path)
Also save the generators, the epoch and the position in it. What each rank has for itself is gathered
before rank 0 saves it, or saved in one file per rank.
"""
THREADS = ("PolymathicAI/the_well#77", "atomistic-machine-learning/schnetpack#785")
STRUCTURAL = False


def check(evidence: Evidence) -> list[Finding]:
    """Compares two epochs at once with one epoch before and one after a checkpoint."""
    if not all(evidence.worked(name) for name in _RUNS):
        if run := evidence.failed(*_RUNS):
            name = run.spec.purpose
            return [cannot_tell(f"The run {name!r} fails ({run.short_reason}), so a resumed run was not examined.")]
        return _of_program(evidence)
    whole, saved, resumed = (evidence.runs[name].ranks[0] for name in _RUNS)
    lost = _different_state(whole, resumed)
    if not lost:
        return []
    done = len(saved.of_kind("step"))
    if _last_epoch(whole, _samples) != _last_epoch(resumed, _samples):
        return [cannot_tell("The resumed run takes other samples.")]
    if evidence.deterministic is False:
        return [cannot_tell("Two runs of the same code give different weights.")]
    cause = _cause(whole, resumed, done)
    if cause is None:
        reason = f"A resumed run differs in {listed(lost)}, but no state is seen that it lacks."
        if _last_epoch(whole, _draws) != _last_epoch(resumed, _draws):
            reason = "The resumed run draws other random numbers, and no state is seen that it lacks."
        return [cannot_tell(reason)]
    what, tensor, step = cause
    message = f"A run that is resumed after {done} steps differs from one that is not interrupted: {what}."
    # Without a tensor, the schedule is lost.
    events = [] if tensor else whole.of_kind("scheduler", "optimizer")
    place = next((event["place"] for event in events if event["place"]), "")
    return [fault(message, step, tensor, _amount(whole, resumed, done), place)]


def _of_program(evidence: Evidence) -> list[Finding]:
    """Compares what a program saves with the state that changes, and with what it has restored after a restart."""
    found = next((found for record in evidence.trained if (found := _not_saved(record))), [])
    if any(finding.verdict is Verdict.FAULT for finding in found):
        return found
    if not any(rank.of_kind("save", "saved") for rank in evidence.ranks):
        return [not_reached("The program saves no checkpoint.")] if evidence.trained else []
    lost = not_restored(evidence)
    if isinstance(lost, str):
        return found or [cannot_tell(f"The checkpoint lacks no known state, but no resumed run was examined: {lost}")]
    if lost is None:
        return []
    return [(fault if lost.is_fault else note)(lost.message, lost.step, place=lost.place)]


def _not_saved(record: RankRecord) -> list[Finding]:
    events = record.of_kind("saved")
    tensors = {digest for event in events for digest in event["tensors"]}
    keys = {key for event in events for key in event["keys"]}
    full = checkpoints(record)
    if not full:
        return []
    event = full[-1]
    for copy in averages(record, event):
        missing = [digest for digest in copy["digests"] if digest not in tensors]
        if 2 * len(missing) > len(copy["digests"]):
            message = (
                f"A {copy['name']} with tensors of the weights' shapes changes in each step, such as an average of "
                "the weights, but the checkpoint with the weights and the optimizer does not contain it."
            )
            amount = f"{len(missing)} of {len(copy['digests'])} tensors are not saved"
            return [fault(message, event["step"], "", amount, event["place"])]
    # A checkpoint may consist of several files.
    saved = sum({one["file"]: one["optimizers"] for one in events}.values())
    if saved < event["stateful"]:
        message = f"The checkpoint contains the state of {saved} of {event['stateful']} optimizers."
        return [fault(message, event["step"], place=event["place"])]
    moves = len({tuple(step["lr"]) for step in record.of_kind("step")}) > 1
    if event["schedulers"] and moves and "last_epoch" not in keys:
        name = event["schedulers"][0]
        message = f"The checkpoint with the weights and the optimizer does not contain the state of the {name}"
        if keys & _POSITIONS:
            if name not in _FROM_LAST_RATE and loads_without_schedule(_files(record)):
                message += ", and the code that loads it starts the schedule from its first step."
                return [fault(message, event["step"], place=event["place"])]
            message += ", but a position from which it can be computed."
            return [note(message, event["step"], place=event["place"])]
        message += ", nor an epoch or a step."
        if not loads_state(_files(record)):
            return [note(f"{message} Nothing loads it yet.", event["step"], place=event["place"])]
        return [fault(message, event["step"], place=event["place"])]
    return []


def _files(record: RankRecord) -> set[str]:
    """Returns the files of the user's code that train and save."""
    events = record.of_kind("step", "save", "saved")
    places = [place for event in events for place in [*event.get("stack", ()), event["place"]] if place]
    return {place.partition(" in ")[0].rpartition(":")[0] for place in places}


def _different_state(whole: RankRecord, resumed: RankRecord) -> list[str]:
    """Returns the places of weights, optimizers, schedules, and modules in attributes that differ at the end."""
    first, second = (record.of_kind("state")[-1]["values"] for record in (whole, resumed))
    different = [place for place, value in first.items() if second.get(place) != value]
    return [place for place in different if not place.startswith("attribute") or "." in place.rpartition(" ")[2]]


def _samples(batch: dict[str, Any]) -> Any:
    return batch["indices"], batch.get("samples")


def _draws(batch: dict[str, Any]) -> Any:
    return batch.get("draw_digest"), batch.get("at_step")


def _last_epoch(record: RankRecord, value: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Returns a value of each batch of the last training epoch."""
    batches = [event for event in record.of_kind("batch") if event["trains"]]
    last = [(event["loader"], event["iteration"]) for event in batches][-1:]
    return [value(event) for event in batches if (event["loader"], event["iteration"]) in last]


def _cause(whole: RankRecord, resumed: RankRecord, done: int) -> tuple[str, str, int] | None:
    """Returns the state that is not restored, the tensor, and the first step that shows it; None if none is seen."""
    steps = whole.of_kind("step")[done:], resumed.of_kind("step")
    names = resumed.of_kind("step")[0]["names"] if steps[1] else {}
    begin, gradients, after = (
        _differing(whole, resumed, f"{what}/{done}/", f"{what}/0/") for what in ("before", "applied", "after")
    )
    if begin:
        tensors = [names.get(key, key) for key in begin]
        return f"{listed(tensors)} of the weights are not restored", tensors[0], done
    for step, (a, b) in enumerate(zip(*steps, strict=False), done):
        if a["lr"] != b["lr"]:
            lrs = f"{b['lr'][0]:.3g} instead of {a['lr'][0]:.3g}"
            return f"the learning rate of step {step} is {lrs}, so the schedule is not restored", "", step
    if after and not gradients:
        tensor = names.get(after[0], after[0])
        return "the same gradient gives another update, so the optimizer is not restored", tensor, done
    missing = _missing_at_begin(whole, resumed)
    for kind in ("weights", "optimizer", "scheduler"):
        if places := [place for place in missing if place.startswith(f"{kind} ")]:
            return f"{listed(places)} is not restored", places[0].partition(" ")[2], done
    if missing and gradients:
        attribute = missing[0].split(" ")[1]
        return f"the attribute {attribute} is not restored, and not in the checkpoint", attribute, done
    return None


def _missing_at_begin(whole: RankRecord, resumed: RankRecord) -> list[str]:
    """Returns the places of the state that differ when the resumed epoch begins, modules in attributes first."""
    begun = whole.of_kind("begin")[-1:], resumed.of_kind("begin")[:1]
    if not all(begun):
        return []
    first, second = (events[0]["values"] for events in begun)
    places = [place for place, value in first.items() if second.get(place) != value]
    return sorted(places, key=lambda place: "." not in place.rpartition(" ")[2])


def _differing(whole: RankRecord, resumed: RankRecord, first: str, second: str) -> list[str]:
    """Returns the keys of the tensors that differ."""
    keys = [name.removeprefix(second) for name in resumed.tensors if name.startswith(second)]
    pairs = [(key, whole.tensors.get(first + key), resumed.tensors[second + key]) for key in keys]
    return [key for key, a, b in pairs if a is not None and not torch.equal(a, b)]


def _amount(whole: RankRecord, resumed: RankRecord, done: int) -> str:
    """Returns the difference of the final weights, relative to the update since the checkpoint."""
    last = len(whole.of_kind("step")) - 1
    difference, update = 0.0, 0.0
    for name, begin in whole.tensors.items():
        if name.startswith(f"before/{done}/"):
            key = name.rpartition("/")[2]
            a, b = whole.tensors.get(f"after/{last}/{key}"), resumed.tensors.get(f"after/{last - done}/{key}")
            if a is not None and b is not None and a.shape == b.shape:
                difference += float((a - b).norm()) ** 2
                update += float((a - begin).norm()) ** 2
    return f"{(difference / update) ** 0.5:.1e} of the update" if update else ""
