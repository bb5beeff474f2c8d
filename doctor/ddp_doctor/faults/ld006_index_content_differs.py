"""LD006: the same index has different content."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import communicates, contents, leak, training_epochs
from ddp_doctor.evidence.own_parts import own_part
from ddp_doctor.evidence.requirements import communicating, map_style
from ddp_doctor.findings import Finding, cannot_tell, fault

CODE = "LD006"
TITLE = "The same index has different content"
CAUSE = """\
Python randomizes the hashes of strings in each process, so the order of a `set` and the value of `hash()`
differ between ranks. Classes, vocabularies or file lists built from them give the same index another meaning
on each rank. The ranks train on contradictory labels, and the loss is only somewhat worse. A launcher that
forks its ranks hides the fault on one machine. A mean, a scale or a vocabulary that each rank computes from its own
part of the data has the same effect.
"""
WRONG = """\
# A set has another order in each process.
classes = {name: number for number, name in enumerate(set(names))}
"""
FIX = """\
Give a sample the same values on all ranks. Sort before numbering, and never store `hash()` of a string:
    classes = {name: n for n, name in enumerate(sorted(set(names)))}
Compute statistics of the data before it is split, or reduce their sums and counts over the ranks.
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
    return _own_part(evidence)


def _own_part(evidence: Evidence) -> list[Finding]:
    """Finds values that each rank computes from its own part of the data."""
    found = own_part(evidence) if communicates(evidence) else None
    if found is None:
        return []
    what = "a vocabulary or a numbering of classes" if found.numbered else "a mean and a scale"
    here, alone = (", ".join(f"{value:.4g}" for value in values) for values in (found.values, found.alone))
    message = (
        f"The ranks have parts of the data of one process, and the same sample has other values in them: sample "
        f"{found.index} of rank {found.rank} begins with {here}, and with {alone} on one process. Each rank computes "
        f"{what} from its own part."
    )
    place = next((event["place"] for events in training_epochs(evidence.ranks) for event in events), "")
    return [fault(message, 0, f"value {found.leaf} of {found.dataset}", place=place)]


def _called(evidence: Evidence) -> Finding | None:
    """A data set was called directly on all ranks."""
    bases = {event["base"] for events in training_epochs(evidence.ranks) for event in events}
    if any(contents(evidence.ranks, base).same is not None for base in bases):
        return None
    return cannot_tell("Direct calls of the data set do not show whether an index means the same sample on each rank.")


NEEDS = (communicating, map_style, _called)
