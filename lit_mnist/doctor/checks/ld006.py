"""LD006: the same index has different content."""

from __future__ import annotations

from lit_mnist.doctor.evidence import Evidence, fault
from lit_mnist.doctor.findings import Finding
from lit_mnist.doctor.order import Contents, communicates, contents, leak, training_epochs
from lit_mnist.doctor.records import Run

TITLE = "The same index has different content"
CAUSE = (
    "The order of a set, and `hash()` of a string, differ between Python processes. Class numbers or file "
    "lists that come from them differ between ranks, so the ranks disagree on what a label means."
)
FIX = "Sort before numbering:\n    classes = sorted(set(labels))"
THREADS = ("jdb78/pytorch-forecasting#2293",)
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Compares what direct calls of the data sets gave on each rank, whose sets of strings have different orders."""
    bases = {event["base"]: event for events in training_epochs(evidence.ranks) for event in events[:1]}
    for base, event in bases.items():
        found = contents(evidence.ranks, base)
        if not (found.different or found.permuted) or leak(evidence.ranks) or not communicates(evidence):
            continue
        if found.different:
            shown = ", ".join(map(str, found.different[:4]))
            amount = f"{len(found.different)} of {found.calls} samples"
            message = (
                f"{amount} of the {event['dataset']} have the same content but another label on each rank, such as the "
                f"samples {shown}."
            )
        else:
            amount = f"{found.calls} samples"
            message = f"The {event['dataset']} has the same samples on each rank, but under other indices."
        run = evidence.run("one seed", same_seed=True)
        message += _cause(run, base)
        values = {"step": event["step"], "amount": amount, "place": evidence.relative(event["place"])}
        return [fault("LD006", message, **values)]
    return []


def _cause(run: Run, base: int) -> str:
    if not run.worked:
        return ""
    again: Contents = contents(run.ranks, base)
    if again.different or again.permuted:
        return (
            " It is so with one seed on all ranks, too: the order of a set or hash(), which differ per process, or "
            "that of the files of a folder."
        )
    return " With one seed on all ranks they are equal: a random number without a seed."
