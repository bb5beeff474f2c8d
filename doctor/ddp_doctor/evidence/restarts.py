"""A program that resumes by itself: it is ended after its first checkpoint, and started again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.probes.options import FOLDER, NOTHING, OPTIONS
from ddp_doctor.records.run import RankRecord, Run

RUN = "started again"


@dataclass(frozen=True)
class Lost:
    """State that a resumed program lacks.

    Attributes:
        message: What is lost.
        step: The optimizer steps before the checkpoint.
        place: Where the user's code loads the checkpoint, or else where it saves it.
        is_fault: Whether it changes more than which values are dropped.
    """

    message: str
    step: int
    place: str
    is_fault: bool = True


def start_again(evidence: Evidence) -> str:
    """Ends a program after its first checkpoint, and starts it again; returns the outcome."""
    if evidence.deterministic is False or not any(map(checkpoints, evidence.trained)):
        return ""
    interrupted = evidence.run("interrupted", interventions={"until_saved": True})
    if not interrupted.worked:
        return f"ended after its checkpoint, the program failed: {interrupted.short_reason}"
    words = _option(interrupted)
    begun = f"the program was ended after its first checkpoint, and started again{f' with {words[0]}' if words else ''}"
    run = evidence.run(RUN, interventions={"started_again": True, "resume_by": words})
    return begun if run.worked else f"{begun}, the program failed: {run.short_reason}"


def _option(run: Run) -> list[str]:
    """Returns the option with which a program resumes, and the checkpoint that it takes; nothing if none is known."""
    path = run.folder / OPTIONS
    files = [event["file"] for record in run.ranks for event in checkpoints(record)]
    if not path.exists() or not files:
        return []
    option, kind = json.loads(path.read_text())
    if kind == NOTHING:
        return [option]
    return [option, str(Path(files[-1]).parent) if kind == FOLDER else files[-1]]


def checkpoints(record: RankRecord) -> list[dict[str, Any]]:
    """Returns the events that saved the weights and an optimizer: weights alone are no checkpoint to resume from."""
    events = record.of_kind("saved")
    tensors = {digest for event in events for digest in event["tensors"]}
    return [event for event in events if event["optimizers"] and set(event["weights"]) <= tensors]


def averages(record: RankRecord, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what has tensors of the weights' shapes and changes in each step, when a checkpoint was saved."""
    for copy in event["copies"]:
        changes = [survey["digests"].get(copy["id"]) for survey in record.of_kind("copies")][1:]
        if len(set(changes)) > 1 and len(set(changes)) == len(changes) and None not in changes:
            yield copy


def not_restored(evidence: Evidence) -> Lost | str | None:
    """Returns what a resumed program lacks, None if it lacks nothing, or why that is not known."""
    run, first = evidence.runs.get(RUN), evidence.trained[0] if evidence.trained else None
    if run is None or first is None:
        interrupted = evidence.runs.get("interrupted")
        if interrupted and not interrupted.worked:
            return f"a run that ends after its checkpoint fails ({interrupted.short_reason})."
        if evidence.deterministic is False:
            return "two runs of the same code give different weights."
        return "no file has the weights and an optimizer."
    if not run.worked:
        return f"started again after its checkpoint, the program fails ({run.short_reason})."
    begins = [record.of_kind("continued") for record in run.ranks]
    if not all(begins):
        return "started again after its checkpoint, the program takes no step."
    saved = _resumed_from(checkpoints(first), begins[0][0]["weights"])
    if saved is None:
        return "started again, the program does not resume from its checkpoint; it may need an option."
    return _lost(first, run.ranks, begins, saved) or taken_from_rank_0(evidence.trained, run.ranks, saved)


def _resumed_from(events: list[dict[str, Any]], begun: list[str]) -> dict[str, Any] | None:
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


def _lost(
    first: RankRecord, ranks: list[RankRecord], begins: list[list[dict[str, Any]]], saved: dict[str, Any]
) -> Lost | None:
    step = saved["step"]
    place = next((event["place"] for event in ranks[0].of_kind("load_state_dict")), saved["place"])
    for record, surveys in zip(ranks, begins, strict=True):
        for number, state in enumerate(saved["states"]):
            if state and surveys[0]["states"][number : number + 1] == [""] and not _is_sharded(first, number):
                where = f"rank {record.rank} does" if begins[0][0]["states"][number] else "the resumed program does"
                text = f"The checkpoint has the state of an optimizer, but {where} not restore it."
                return Lost(text, step, place)
        # What was read from the checkpoint, and does not change, is not the average.
        changing = [
            sorted(values) for key, values in surveys[0]["copies"].items() if surveys[-1]["copies"].get(key) != values
        ]
        for copy in averages(first, saved) if len(surveys) > 1 else ():
            if sorted(copy["digests"]) not in changing:
                text = (
                    f"A {copy['name']} with tensors of the weights' shapes changes in each step, such as an average of "
                    "the weights, but a resumed run begins with other values of it."
                )
                return Lost(text, step, place)
    return _other_rate(first, ranks[0], step, place) or _repeated_epoch(first, ranks[0], step, place)


def taken_from_rank_0(
    firsts: Sequence[RankRecord], resumed: Sequence[RankRecord], saved: dict[str, Any]
) -> Lost | None:
    """Returns what the ranks had each for itself, and what all of them get from rank 0 in a resumed run."""
    step = saved["step"]
    place = next((event["place"] for event in resumed[0].of_kind("load_state_dict")), saved["place"])
    before = [_first_call(record, step) for record in firsts]
    after = [_first_call(record, 0) for record in resumed]
    first, again = before[0], after[0]
    for rank, (own, other) in enumerate(zip(before[1:], after[1:], strict=False), 1):
        if not (first and again and own and other):
            continue
        # Each input, such as the samples or the state of a recurrent network. If rank 0 continues with another input, a
        # small one, such as a length, may be equal by chance.
        inputs = zip(*(call["inputs"] for call in (first, again, own, other)), strict=False)
        text = f"At the first step after the checkpoint of step {step}, rank {rank} continues with "
        if first["inputs"] == again["inputs"] and any(_is_taken(*values) for values in inputs):
            text += (
                "an input of rank 0, such as its samples or the state of its network: the checkpoint has the position "
                "or the state of rank 0 alone, and all ranks load it."
            )
            return Lost(text, step, place)
        for name in first["generators"]:
            if _is_taken(*(call["generators"][name] for call in (first, again, own, other))):
                text += f"the state of rank 0's generator of {name}, so that all ranks draw the same random numbers."
                # Dropout alone leaves the inputs as they are.
                return Lost(text, step, place, is_fault=own["inputs"] != other["inputs"])
    return None


def _is_taken(first: str, again: str, own: str, other: str) -> bool:
    """Returns whether rank 0 continues with its own value, and another rank with that of rank 0."""
    return first == again == other != own


def _first_call(record: RankRecord, step: int) -> dict[str, Any] | None:
    """Returns the first forward pass of a step, with gradients and with all that is compared."""
    events = (event for event in record.of_kind("forward") if event["step"] == step and event.get("generators"))
    return next(events, None)


def _repeated_epoch(first: RankRecord, resumed: RankRecord, step: int, place: str) -> Lost | None:
    """Compares the epoch that is trained after a checkpoint, as the sampler is told it."""
    before = [event["number"] for event in first.of_kind("set_epoch") if event["step"] < step]
    after = [event["number"] for event in first.of_kind("set_epoch") if event["step"] == step]
    again = [event["number"] for event in resumed.of_kind("set_epoch")]
    if not before or not after or not again or again[0] != before[-1] or after[0] == before[-1]:
        return None
    text = (
        f"The checkpoint is saved at the end of epoch {before[-1]}, but a resumed run trains epoch {again[0]} again, "
        "with the same order of samples."
    )
    return Lost(text, step, place)


def _other_rate(first: RankRecord, resumed: RankRecord, step: int, place: str) -> Lost | None:
    """Compares the learning rate of the first step after a checkpoint."""
    expected = next((event for event in first.of_kind("step") if event["step"] == step), None)
    found = resumed.of_kind("step")[0]
    if expected is None or expected["optimizer"] != found["optimizer"] or expected["lr"] == found["lr"]:
        return None
    text = (
        f"After {step} steps, a resumed run takes its next step with the learning rate {found['lr'][0]:.3g} instead of "
        f"{expected['lr'][0]:.3g}."
    )
    return Lost(text, step, place)


def _is_sharded(record: RankRecord, optimizer: int) -> bool:
    """Returns whether each rank has the state of its own part of the weights only."""
    events = [event for event in record.of_kind("step") if event["optimizer"] == optimizer]
    return any(event["sharded"] or event["name"].startswith("Zero") for event in events)
