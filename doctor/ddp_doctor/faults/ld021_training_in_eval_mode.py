"""LD021: the model trains in evaluation mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, cannot_tell, fault, listed, note
from ddp_doctor.records.run import RankRecord

Part = tuple[str, str]

CODE = "LD021"
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
Restore the mode at the end of the evaluation, on each rank:
    was_training = model.training
    model.eval()
    ...
    model.train(was_training)
"""
THREADS = ("huggingface/lerobot#3668",)
STRUCTURAL = True
EXPLAINS = "weights"


@dataclass
class _Modes:
    """The modes of one step's training forward passes.

    Attributes:
        training: By module class and part: whether it was in training mode; both if it was called in both.
        sensitive: The parts whose outputs depend on the mode.
        place: The user's place of the last forward pass.
    """

    training: dict[Part, set[bool]] = field(default_factory=dict)
    sensitive: set[Part] = field(default_factory=set)
    place: str = ""

    def of(self, mode: bool) -> set[Part]:
        """Returns the parts that were in this mode alone."""
        return {part for part, modes in self.training.items() if modes == {mode}}


def check(evidence: Evidence) -> list[Finding]:
    """Compares the modes of all parts between ranks and between steps."""
    modes = [_modes(record) for record in evidence.trained]
    for step in sorted(set.intersection(*map(set, modes))):
        for rank, other in permutations(range(len(modes)), 2):
            if evaluating := modes[rank][step].of(False) & modes[other][step].of(True):
                message = f"Rank {rank} trains in evaluation mode, but rank {other} in training mode"
                return [_fault(evidence.ranks[rank], modes[rank], step, evaluating, message)]
    for record, found in zip(evidence.trained, modes, strict=True):
        first, *later = sorted(found)
        for step in later:
            evaluating = found[first].of(True) & found[step].of(False)
            if evaluating and found[step].of(True) & found[first].of(True):
                message = f"From step {step} on, {_names(evaluating)} are in evaluation mode; the other parts are not."
                return [note(message, step, place=found[step].place)]
            if evaluating:
                message = f"From step {step} on, the model trains in evaluation mode"
                return [_fault(record, found, step, evaluating, message)]
        start = found[first]
        if start.sensitive and not any(True in modes for modes in start.training.values()):
            message = "From the first step on, the model trains in evaluation mode"
            if _left_training(record):
                return [_fault(record, found, first, start.of(False), message)]
            return [note(f"{message}: {_names(start.sensitive)} have no effect.", first, place=start.place)]
    return []


def _left_training(record: RankRecord) -> bool:
    """Returns whether the program calls train() before the first step, and eval() of the same module after that."""
    trained = set[str]()
    for event in record.of_kind("train", "eval", "step"):
        if event["kind"] == "step":
            return False
        if event["kind"] == "train":
            trained.add(event["module"])
        elif event["place"] and event["module"] in trained:
            return True
    return False


def _fault(record: RankRecord, modes: dict[int, _Modes], step: int, evaluating: set[Part], message: str) -> Finding:
    calls = [event["place"] for event in record.of_kind("eval") if event["step"] <= step and event["place"]]
    place = calls[-1] if calls else modes[step].place
    if sensitive := evaluating & modes[step].sensitive:
        message += f": eval() is not followed by train(), and {_names(sensitive)} work as in evaluation."
        return fault(message, step, min(sensitive)[1], place=place)
    return note(f"{message}, which has no effect: it has no dropout and no batch norm.", step, place=place)


def _modes(record: RankRecord) -> dict[int, _Modes]:
    """Returns the modes of the forward passes whose results reach a backward pass, by step."""
    found: dict[int, _Modes] = {}
    waiting = []
    for event in record.of_kind("batch", "forward", "backward", "stepped"):
        if event["kind"] == "forward":
            waiting += [event] if event["gradients"] else []
            continue
        if event["kind"] == "backward" and waiting:
            step = found.setdefault(event["step"], _Modes())
            for forward in waiting:
                step.place = forward["place"] or step.place
                step.sensitive |= {(forward["module"], name) for name in forward["sensitive"]}
                for name, training in forward["modes"].items():
                    step.training.setdefault((forward["module"], name), set()).add(training)
        waiting = []
    return found


def _names(parts: set[Part]) -> str:
    return listed([f"{kind}.{name}" if name else kind for kind, name in sorted(parts)])


def _forward_passes(evidence: Evidence) -> Finding | None:
    """Forward passes that lead to a backward pass were seen on all ranks."""
    if evidence.trained and all(map(_modes, evidence.trained)):
        return None
    return cannot_tell("No forward pass of a module that leads to a backward pass was seen.")


NEEDS = (_forward_passes,)
