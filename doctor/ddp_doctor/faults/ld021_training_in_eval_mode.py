"""LD021: the model trains in evaluation mode."""

from itertools import permutations, takewhile

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import need
from ddp_doctor.findings import Finding, cannot_tell, fault, listed, note
from ddp_doctor.records.run import RankRecord

# A part of a module, by the class of the module and its name.
Part = tuple[str, str]
# Whether each part was in training mode; both if it was called in both.
Modes = dict[Part, set[bool]]

TITLE = "The model trains in evaluation mode"
CAUSE = """\
`model.eval()` stays in effect until `model.train()` is called: after an evaluation, dropout is off and batch norm no
longer updates, perhaps on one rank only. The training loss even looks better.
"""
WRONG = """\
for epoch in range(epochs):
    train_one_epoch(model)
    evaluate(model)    # calls model.eval(), and nothing calls model.train() again
"""
FIX = """\
Call `train()` after each evaluation, on each rank:
    evaluate(model)
    model.train()
"""
THREADS = ("huggingface/lerobot#3668",)
EXPLAINS = "weights"


def check(evidence: Evidence) -> list[Finding]:
    """Compares the modes of all parts between ranks and between steps."""
    modes = [_modes(record) for record in evidence.trained]
    for step in sorted(set.intersection(*map(set, modes))):
        for rank, other in permutations(range(len(modes)), 2):
            if evaluating := _only(False, modes[rank][step]) & _only(True, modes[other][step]):
                message = f"Rank {rank} trains in evaluation mode, but rank {other} in training mode"
                return [_fault(evidence.ranks[rank], step, evaluating, message)]
    for record, found in zip(evidence.trained, modes, strict=True):
        first, *later = sorted(found)
        trained = _only(True, found[first])
        for step in later:
            evaluating = trained & _only(False, found[step])
            # Some parts alone may be frozen on purpose.
            if evaluating and not trained & _only(True, found[step]):
                return [_fault(record, step, evaluating, f"From step {step} on, the model trains in evaluation mode")]
        sensitive = _sensitive(record) & found[first].keys()
        if sensitive and not any(True in modes for modes in found[first].values()):
            message = "From the first step on, the model trains in evaluation mode"
            if _left_training(record):
                return [_fault(record, first, sensitive, message)]
            return [note(f"{message}: {_names(sensitive)} have no effect.", first, place=_place(record, first))]
    return []


def _left_training(record: RankRecord) -> bool:
    """Returns whether the program calls train() and eval() of the same module before the first step."""
    calls = list(takewhile(lambda event: event["kind"] != "step", record.of_kind("train", "eval", "step")))
    trained = {event["module"] for event in calls if event["kind"] == "train"}
    return any(event["kind"] == "eval" and event["place"] and event["module"] in trained for event in calls)


def _fault(record: RankRecord, step: int, evaluating: set[Part], message: str) -> Finding:
    if sensitive := evaluating & _sensitive(record):
        message += f": eval() is not followed by train(), and {_names(sensitive)} work as in evaluation."
        return fault(message, step, min(sensitive)[1], place=_place(record, step))
    return note(f"{message}, which has no effect: it has no dropout and no batch norm.", step)


def _modes(record: RankRecord) -> dict[int, Modes]:
    """Returns the modes of the forward passes whose results reach a backward pass, by step."""
    found: dict[int, Modes] = {}
    waiting = []
    for event in record.of_kind("batch", "forward", "backward", "stepped"):
        if event["kind"] == "forward":
            waiting += [event] if event["gradients"] else []
            continue
        if event["kind"] == "backward" and waiting:
            step = found.setdefault(event["step"], {})
            for forward in waiting:
                for name, training in forward["modes"].items():
                    step.setdefault((forward["module"], name), set()).add(training)
        waiting = []
    return found


def _only(mode: bool, modes: Modes) -> set[Part]:
    """Returns the parts that were in this mode alone."""
    return {part for part, found in modes.items() if found == {mode}}


def _sensitive(record: RankRecord) -> set[Part]:
    """Returns the parts whose outputs depend on the mode."""
    return {(event["module"], name) for event in record.of_kind("forward") for name in event["sensitive"]}


def _place(record: RankRecord, step: int) -> str:
    """Returns the user's place of the last call of eval() up to a step, or that of a forward pass."""
    events = [event for kind in ("forward", "eval") for event in record.of_kind(kind) if event["step"] <= step]
    return next((event["place"] for event in reversed(events) if event["place"]), "")


def _names(parts: set[Part]) -> str:
    return listed([f"{kind}.{name}" if name else kind for kind, name in sorted(parts)])


_forward_passes = need(
    lambda evidence: bool(evidence.trained) and all(map(_modes, evidence.trained)),
    cannot_tell("No forward pass of a module that leads to a backward pass was seen."),
)
NEEDS = (_forward_passes,)
