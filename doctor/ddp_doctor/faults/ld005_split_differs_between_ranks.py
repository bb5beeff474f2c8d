"""LD005: the split differs between ranks."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import communicates, evaluation_epochs, leak, training_epochs
from ddp_doctor.evidence.requirements import communicating, evaluation, training_loader
from ddp_doctor.findings import Finding, fault

CODE = "LD005"
TITLE = "The split differs between ranks"
CAUSE = """\
`random_split` draws from the global generator. If the ranks are not seeded equally at that moment, each rank
makes a different split, and the validation samples of one rank are training samples of another. The model
trains on its validation set, and the validation metric is too good. A sampler that divides positions among the ranks
divides other samples if each rank has selected its own, as in active learning.
"""
WRONG = """\
train, validation = random_split(dataset, [0.9, 0.1])    # drawn on each rank for itself
"""
FIX = """\
Split with a separate generator:
    random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))
Gather what ranks select, so that all have the same list.
"""
THREADS = ("Lightning-AI/pytorch-lightning#7728", "Lightning-AI/pytorch-lightning#18638")
STRUCTURAL = True
NEEDS = (communicating, evaluation, training_loader)


def check(evidence: Evidence) -> list[Finding]:
    """Looks for the training samples of each rank among the validation samples of the others."""
    found = leak(evidence.ranks) if communicates(evidence) else None
    if found is None:
        return _divided(evidence) if communicates(evidence) and not evidence.faulty else []
    message = (
        f"Rank {found.trains} trains with {found.shared} of the {found.of} samples with which rank {found.validates} "
        f"validates, although no rank validates with its own: each rank splits the data in its own way."
    )
    run = evidence.run("one seed", same_seed=True)
    proof = "with one seed on all ranks there are none" if run.worked and leak(run.ranks) is None else ""
    amount = f"{found.shared} of {found.of} samples"
    return [fault(message, found.event["step"], "", amount, found.event["place"], proof)]


def _divided(evidence: Evidence) -> list[Finding]:
    """Finds samplers that divide the positions of a Subset, which has other samples on each rank."""
    for events in (*training_epochs(evidence.trained), *evaluation_epochs(evidence.trained)):
        if len(events) == len(evidence.trained) and all(event.get("divided") for event in events):
            other = next((rank for rank, event in enumerate(events) if event["divided"] != events[0]["divided"]), None)
            if other is not None:
                message = (
                    f"The {events[0]['sampler']} divides the positions of a Subset among the ranks, but the Subset has "
                    f"other samples on ranks 0 and {other}: some samples are used twice, and some by no rank."
                )
                return [fault(message, events[0]["step"], "", "", events[0]["place"])]
    return []
