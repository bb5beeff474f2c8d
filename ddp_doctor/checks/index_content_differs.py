"""LD006: the same index has different content."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import communicates, contents, leak, training_epochs
from ddp_doctor.evidence.requirements import communicating, map_style
from ddp_doctor.findings import Finding, cannot_tell, fault

CODE = "LD006"
TITLE = "The same index has different content"
CAUSE = """\
Python randomizes the hashes of strings in each process, so the order of a `set` and the value of `hash()`
differ between ranks. Classes, vocabularies or file lists built from them give the same index another meaning
on each rank. The ranks train on contradictory labels, and the loss is only somewhat worse. A launcher that
forks its ranks hides the fault on one machine.
"""
WRONG = """\
# A set has another order in each process.
classes = {name: number for number, name in enumerate(set(names))}
"""
FIX = """\
Sort before numbering, and never store `hash()` of a string:
    classes = {name: n for n, name in enumerate(sorted(set(names)))}
"""
THREADS = ("sktime/pytorch-forecasting#2293", "huggingface/transformers#48162")
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Compares what direct calls of the data sets gave on each rank, whose sets of strings have different orders."""
    bases = {event["base"]: event for events in training_epochs(evidence.ranks) for event in events[:1]}
    for base, event in bases.items():
        found = contents(evidence.ranks, base)
        if not (found.different or found.permuted) or leak(evidence.ranks) or not communicates(evidence):
            continue
        amount = f"{found.calls} samples"
        message = f"The {event['dataset']} has the same samples on each rank, but under other indices."
        if found.different:
            amount = f"{len(found.different)} of {amount}"
            shown = ", ".join(map(str, found.different[:4]))
            message = (
                f"{amount} of the {event['dataset']} have the same content but another label on each rank, such as the "
                f"samples {shown}."
            )
        run = evidence.run("one seed", same_seed=True)
        if run.worked:
            again = contents(run.ranks, base)
            message += (
                " This also happens with one seed on all ranks: the order of a set or hash(), which differ per "
                "process, or that of the files of a folder."
                if again.different or again.permuted
                else " With one seed on all ranks they are equal: a random number without a seed."
            )
        return [fault(message, event["step"], "", amount, event["place"])]
    return []


def _called(evidence: Evidence) -> Finding | None:
    """A data set was called directly on all ranks."""
    bases = {event["base"] for events in training_epochs(evidence.ranks) for event in events}
    if any(contents(evidence.ranks, base).same is not None for base in bases):
        return None
    return cannot_tell("Direct calls of the data set do not show whether an index means the same sample on each rank.")


NEEDS = (communicating, map_style, _called)
