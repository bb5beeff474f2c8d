"""LD025: a resumed training loses state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, cannot_tell, fault
from ddp_doctor.listing import listed
from ddp_doctor.records.run import RankRecord

CODE = "LD025"
TITLE = "A resumed training loses state"
CAUSE = """\
A checkpoint that lacks the scheduler, the scaler, the averaged weights or the optimizer resumes with their
initial values. The learning rate jumps, moments are zero, or training continues from averaged weights. The
loss has a small bump and recovers, so that the difference is attributed to chance.
"""
FIX = """\
Save and load everything that changes in a step:
    state = {'model': model, 'optimizer': optimizer, 'scheduler': scheduler, 'scaler': scaler}
    torch.save({key: part.state_dict() for key, part in state.items()}, path)
Save generators, the epoch and the position in it, too.
"""
THREADS = ("PolymathicAI/the_well#77", "atomistic-machine-learning/schnetpack#785")
STRUCTURAL = False


def check(evidence: Evidence) -> list[Finding]:
    """Compares two epochs at once with one and one from a checkpoint."""
    runs = [evidence.worked(name) for name in ("whole", "save", "resume")]
    whole, saved, resumed = (run.ranks[0] if run else None for run in runs)
    if whole is None or saved is None or resumed is None:
        failed = [
            (name, run) for name in ("whole", "save", "resume") if (run := evidence.runs.get(name)) and not run.worked
        ]
        if failed:
            name, run = failed[0]
            reason = f"The run {name!r} fails ({run.short_reason}), so a resumed training was not examined."
            return [cannot_tell(reason)]
        if any(rank.of_kind("save") for rank in evidence.ranks):
            reason = "The doctor can resume a LightningModule only."
            return [cannot_tell(reason)]
        return []
    lost = _different_state(whole, resumed)
    if not lost:
        return []
    done = len(saved.of_kind("step"))
    if _samples(whole)[-1:] != _samples(resumed)[-1:]:
        return [cannot_tell("The resumed training takes other samples.")]
    if evidence.deterministic is False:
        return [cannot_tell("Two runs of the same code give different weights.")]
    cause = _cause(whole, resumed, done)
    if cause is None:
        reason = f"A resumed training differs in {listed(lost)}, but no state is seen that it lacks."
        if _draws(whole)[-1:] != _draws(resumed)[-1:]:
            reason = "The resumed training draws other random numbers, and no state is seen that it lacks."
        return [cannot_tell(reason)]
    what, tensor, step = cause
    message = f"A training that is resumed after {done} steps differs from one that is not interrupted: {what}."
    # Without a tensor, the schedule is lost.
    events = [] if tensor else whole.of_kind("scheduler", "optimizer")
    place = next((event["place"] for event in events if event["place"]), "")
    return [fault(message, step=step, tensor=tensor, amount=_amount(whole, resumed, done), place=place)]


def _different_state(whole: RankRecord, resumed: RankRecord) -> list[str]:
    """Returns the places of weights, optimizers, schedules, and modules in attributes that differ at the end."""
    first, second = (record.of_kind("state")[-1]["values"] for record in (whole, resumed))
    different = [place for place, value in first.items() if second.get(place) != value]
    return [place for place in different if not place.startswith("attribute") or "." in place.rpartition(" ")[2]]


def _samples(record: RankRecord) -> list[list[Any]]:
    """Returns the samples of each training epoch, by batch: their indices and contents."""
    return _by_epoch(record, lambda event: (event["indices"], event.get("samples")))


def _draws(record: RankRecord) -> list[list[Any]]:
    """Returns what the steps of each training epoch draw, and the states of the generators before."""
    return _by_epoch(record, lambda event: (event.get("draw_digest"), event.get("at_step")))


def _by_epoch(record: RankRecord, value: Callable[[dict[str, Any]], Any]) -> list[list[Any]]:
    found: dict[tuple[int, int], list[Any]] = {}
    for event in record.of_kind("batch"):
        if event["trains"]:
            found.setdefault((event["loader"], event["iteration"]), []).append(value(event))
    return list(found.values())


def _cause(whole: RankRecord, resumed: RankRecord, done: int) -> tuple[str, str, int] | None:
    """Returns the state that is not restored, the tensor, and the first step that shows it; None if none is seen."""
    steps = whole.of_kind("step")[done:], resumed.of_kind("step")
    names = resumed.of_kind("step")[0]["names"] if steps[1] else {}
    begin = _differing(whole, resumed, f"before/{done}/", "before/0/")
    if begin:
        tensors = [names.get(key, key) for key in begin]
        return f"{listed(tensors)} of the weights are not restored", tensors[0], done
    for number, (a, b) in enumerate(zip(*steps, strict=False)):
        if a["lr"] != b["lr"]:
            return (
                f"the learning rate of step {done + number} is {b['lr'][0]:.3g} instead of {a['lr'][0]:.3g}, so the "
                "schedule is not restored",
                "",
                done + number,
            )
    gradients = _differing(whole, resumed, f"applied/{done}/", "applied/0/")
    after = _differing(whole, resumed, f"after/{done}/", "after/0/")
    if after and not gradients:
        tensor = names.get(after[0], after[0])
        return "the same gradient gives another update, so the optimizer is not restored", tensor, done
    missing = _missing_at_begin(whole, resumed)
    for kind in ("weights", "optimizer", "scheduler"):
        if places := [place for place in missing if place.startswith(f"{kind} ")]:
            return f"{listed(places)} is not restored", places[0].partition(" ")[2], done
    attributes = list(dict.fromkeys(place.split(" ")[1] for place in missing))
    if attributes and gradients:
        return f"the attribute {attributes[0]} is not restored, and not in the checkpoint", attributes[0], done
    return None


def _missing_at_begin(whole: RankRecord, resumed: RankRecord) -> list[str]:
    """Returns the places of the state that differ when the resumed epoch begins, modules in attributes first."""
    begun = whole.of_kind("begin"), resumed.of_kind("begin")
    if not all(begun):
        return []
    first, second = begun[0][-1]["values"], begun[1][0]["values"]
    places = [place for place, value in first.items() if second.get(place) != value]
    return sorted(places, key=lambda place: "." not in place.rpartition(" ")[2])


def _differing(whole: RankRecord, resumed: RankRecord, first: str, second: str) -> list[str]:
    """Returns the keys of the tensors that differ."""
    keys = [name.removeprefix(second) for name in resumed.tensors if name.startswith(second)]
    pairs = [(key, whole.tensors.get(first + key), resumed.tensors[second + key]) for key in keys]
    return [key for key, a, b in pairs if a is not None and not (a.shape == b.shape and torch.equal(a, b))]


def _amount(whole: RankRecord, resumed: RankRecord, done: int) -> str:
    """Returns the difference of the final weights, relative to the update since the checkpoint."""
    last = len(whole.of_kind("step")) - 1
    difference, update = 0.0, 0.0
    for name, begin in whole.tensors.items():
        if not name.startswith(f"before/{done}/"):
            continue
        key = name.rpartition("/")[2]
        ends = whole.tensors.get(f"after/{last}/{key}"), resumed.tensors.get(f"after/{last - done}/{key}")
        if ends[0] is not None and ends[1] is not None and ends[0].shape == ends[1].shape:
            difference += float((ends[0] - ends[1]).norm()) ** 2
            update += float((ends[0] - begin).norm()) ** 2
    return f"{(difference / update) ** 0.5:.1e} of the update" if update else ""
