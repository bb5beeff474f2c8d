"""LD025: a resumed run loses state."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event
from ddp_doctor.findings import Finding, cannot_tell, fault, listed, not_reached, note
from ddp_doctor.records.run import RankRecord, Run

TITLE = "A resumed run loses state"
CAUSE = """\
A checkpoint that lacks the scheduler, the averaged weights or the optimizer resumes with their initial values, and with
one of rank 0, all ranks continue with its position in the data and its generators. The loss has only a small bump.
Lightning 2.6.6 resumes with the order of the first epoch if a loader has workers; with lit_mnist's ExactCheckpoint, it
does not.
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
THREADS = (
    "PolymathicAI/the_well#77",
    "atomistic-machine-learning/schnetpack#785",
    "Lightning-AI/pytorch-lightning#20550",
    "Lightning-AI/pytorch-lightning#21938",
    "huggingface/accelerate#2016",
)
NUMERIC = True
_AVERAGE = "with tensors of the weights' shapes changes in each step, such as an average of the weights"


def check(evidence: Evidence) -> list[Finding]:
    """Compares what a program saves with the state that changes, and with what it has restored after a restart."""
    if found := next((found for record in evidence.trained if (found := _not_saved(record))), None):
        return [found]
    if not any(rank.of_kind("save", "saved") for rank in evidence.ranks):
        return [not_reached("The program saves no checkpoint.")] if evidence.trained else []
    if not evidence.deterministic:
        return [_unknown("two runs of the same code give different weights.")]
    if not any(map(_checkpoints, evidence.trained)):
        return [_unknown("no file has the weights and an optimizer.")]
    interrupted = evidence.run("interrupted", interventions={"until_saved": True})
    if not interrupted.worked:
        return [_unknown(f"a run that ends after its checkpoint fails ({interrupted.short_reason}).")]
    run = evidence.run("started again", interventions={"started_again": True, "resume_by": _option(interrupted)})
    if not run.worked:
        return [_unknown(f"started again after its checkpoint, the program fails ({run.short_reason}).")]
    lost = _not_restored(evidence.trained, run.ranks)
    return [lost] if lost else []


def _unknown(why: str) -> Finding:
    return cannot_tell(f"The checkpoint lacks no known state, but no resumed run was examined: {why}")


def _not_saved(record: RankRecord) -> Finding | None:
    """Returns a finding of state that changes, and that is in no file."""
    full = _checkpoints(record)
    if not full:
        return None
    event, events = full[-1], record.of_kind("saved")
    where = event["step"], "", "", _place(event, record)
    tensors = {digest for one in events for digest in one["tensors"]}
    for name, digests in _averages(record, event):
        missing = [digest for digest in digests if digest not in tensors]
        if 2 * len(missing) > len(digests):
            return fault(f"A {name} {_AVERAGE}, but the checkpoint does not contain it.", *where)
    # A checkpoint may consist of several files.
    saved = sum({one["file"]: one["optimizers"] for one in events}.values())
    if saved < event["stateful"]:
        return fault(f"The checkpoint contains the state of {saved} of {event['stateful']} optimizers.", *where)
    return None


def _checkpoints(record: RankRecord) -> list[Event]:
    """Returns the events that saved the weights and an optimizer: weights alone are no checkpoint to resume from."""
    events = record.of_kind("saved")
    tensors = {digest for event in events for digest in event["tensors"]}
    return [event for event in events if event["optimizers"] and set(event["weights"]) <= tensors]


def _averages(record: RankRecord, event: Event) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields what has tensors of the weights' shapes and changes in each step, as a checkpoint has saved it.

    Of each, it yields the type and the digests of the tensors.
    """
    for key, copy in event["copies"].items():
        changes = [survey["copies"].get(key) for survey in record.of_kind("state")][1:]
        if len(set(changes)) > 1 and len(set(changes)) == len(changes) and None not in changes:
            yield copy


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
    begins = [record.of_kind("state") for record in ranks]
    if not all(begins):
        return _unknown("started again after its checkpoint, the program takes no step.")
    weights = begins[0][0]["weights"]
    saved = next((event for event in reversed(_checkpoints(firsts[0])) if event["weights"] == weights), None)
    if saved is None:
        return _unknown("started again, the program does not resume from its checkpoint; it may need an option.")
    place = _place(next(iter(ranks[0].of_kind("load_state_dict")), saved), ranks[0])
    step = saved["step"]
    message = (
        _lost(firsts[0], ranks, begins, saved)
        or _other_rate(firsts[0], ranks[0], step)
        or _repeated_epoch(firsts[0], ranks[0], step)
        or _taken_from_rank_0(firsts, ranks, step)
    )
    if message:
        return fault(message, step, place=place)
    told = _other_samples(firsts[0], ranks[0], step)
    return note(told, step, place=place) if told else None


def _place(event: Event, record: RankRecord) -> str:
    """Returns the user's place of an event, or, if a Trainer saves and loads, that of what is saved."""
    events = [event, *record.of_kind("scheduler", "optimizer")]
    return next((one["place"] for one in events if one["place"]), "")


def _lost(first: RankRecord, ranks: Sequence[RankRecord], begins: Sequence[Sequence[Event]], saved: Event) -> str:
    """Returns which state of an optimizer or an average a checkpoint has, and a resumed run has not."""
    for record, surveys in zip(ranks, begins, strict=True):
        for number, state in enumerate(saved["states"]):
            if state and surveys[0]["states"][number : number + 1] == [""] and not _is_sharded(first, number):
                return f"The checkpoint has the state of an optimizer, but rank {record.rank} does not restore it."
        # What was read from the checkpoint, and does not change, is not the average.
        changing = [
            sorted(copy[1]) for key, copy in surveys[0]["copies"].items() if surveys[-1]["copies"].get(key) != copy
        ]
        for name, digests in _averages(first, saved) if len(surveys) > 1 else ():
            if sorted(digests) not in changing:
                return f"A {name} {_AVERAGE}, but a resumed run begins with other values of it."
    return ""


def _is_sharded(record: RankRecord, optimizer: int) -> bool:
    """Returns whether each rank has the state of its own part of the weights only."""
    events = [event for event in record.of_kind("step") if event["optimizer"] == optimizer]
    return any(event["sharded"] or event["name"].startswith("Zero") for event in events)


def _other_rate(first: RankRecord, resumed: RankRecord, step: int) -> str:
    """Compares the learning rates after a checkpoint; that of its first step is in the state of the optimizer."""
    for expected, found in zip(_steps_of_epoch(first, step), _steps_of_epoch(resumed), strict=False):
        if expected["optimizer"] == found["optimizer"] and expected["lr"] != found["lr"]:
            rates = f"the learning rate {found['lr'][0]:.3g} instead of {expected['lr'][0]:.3g}"
            return f"After {step} steps, a resumed run continues with {rates}."
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


def _other_samples(first: RankRecord, resumed: RankRecord, step: int) -> str:
    """Compares the samples after a checkpoint; within an epoch, many programs begin another one on purpose."""
    trained, again = ([batch for batch in record.of_kind("batch") if batch["trains"]] for record in (first, resumed))
    expected = next((batch for batch in trained if batch["step"] == step), None)
    found = again[0]["indices"] if again else None
    if not (expected and found) or expected["indices"] == found:
        return ""
    if expected["number"]:
        return (
            f"The checkpoint after step {step} is within an epoch, and a resumed run goes on with other samples: some "
            "are used twice, others never."
        )
    if all(batch["number"] or batch["indices"] != found for batch in trained if batch["step"] < step):
        return ""
    return f"The checkpoint after step {step} ends an epoch, and a resumed run repeats the order of an earlier one."


def _repeated_epoch(first: RankRecord, resumed: RankRecord, step: int) -> str:
    """Compares the epoch that is trained after a checkpoint, as the sampler is told it."""
    told = [(event["step"], event["number"]) for event in first.of_kind("set_epoch")]
    before = [number for at, number in told if at < step][-1:]
    after = [number for at, number in told if at == step][:1]
    again = [event["number"] for event in resumed.of_kind("set_epoch")][:1]
    if not (before and after and again == before != after):
        return ""
    return f"The checkpoint is saved at the end of epoch {before[0]}, which a resumed run trains again."


def _taken_from_rank_0(firsts: Sequence[RankRecord], resumed: Sequence[RankRecord], step: int) -> str:
    """Returns what the ranks had each for itself, and all of them get from rank 0 in a resumed run."""
    first, *before = [_first_call(record, step) for record in firsts]
    again, *after = [_first_call(record, 0) for record in resumed]
    for rank, (own, other) in enumerate(zip(before, after, strict=False), 1):
        if not (first and again and own and other):
            continue
        calls = first, again, own, other
        taken = [name for name in first["generators"] if _is_taken(*(call["generators"][name] for call in calls))]
        inputs = zip(*(call["inputs"] for call in calls), strict=False)
        what = ""
        # If rank 0 continues with another input, a small one, such as a length, may be equal by chance.
        if first["inputs"] == again["inputs"] and any(_is_taken(*values) for values in inputs):
            what = "an input of rank 0, such as its samples or the state of its network"
        # Dropout alone leaves the inputs as they are.
        elif taken and own["inputs"] != other["inputs"]:
            what = f"the random numbers of rank 0 ({listed(taken)})"
        if what:
            return f"After step {step}, rank {rank} resumes with {what}: all ranks load what rank 0 alone had."
    return ""


def _first_call(record: RankRecord, step: int) -> Event | None:
    """Returns the first forward pass of a step, with gradients and with all that is compared."""
    events = (event for event in record.of_kind("forward") if event["step"] == step and event.get("generators"))
    return next(events, None)


def _is_taken(first: str, again: str, own: str, other: str) -> bool:
    """Returns whether rank 0 continues with its own value, and another rank with that of rank 0."""
    return first == again == other != own
