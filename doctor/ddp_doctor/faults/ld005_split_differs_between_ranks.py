"""LD005: the split differs between ranks."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import evaluation_epochs, leak, select_differently, training_epochs
from ddp_doctor.evidence.requirements import communicating, evaluation, training_loader, unmet
from ddp_doctor.findings import Finding, fault

TITLE = "The split differs between ranks"
CAUSE = """\
`random_split` draws from the global generator: if the ranks are not seeded equally at that moment, the validation
samples of one rank are training samples of another. The validation metric is then too good.
"""
WRONG = """\
train, validation = random_split(dataset, [0.9, 0.1])    # drawn on each rank for itself
"""
FIX = """\
Split with a separate generator, and gather what ranks select:
    random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))
"""
THREADS = ("Lightning-AI/pytorch-lightning#7728", "Lightning-AI/pytorch-lightning#18638")
NEEDS = (communicating,)


def check(evidence: Evidence) -> list[Finding]:
    """Looks for the training samples of each rank among the validation samples of the others."""
    found = leak(evidence.ranks)
    if found is None:
        return ([] if evidence.faulty else _divided(evidence)) or unmet(evidence, evaluation, training_loader)
    shared = f"{found.shared} of the {found.of} samples with which rank {found.validates} validates"
    message = f"Rank {found.trains} trains with {shared}: each rank splits the data in its own way."
    return [fault(message, found.event["step"], place=found.event["place"])]


def _divided(evidence: Evidence) -> list[Finding]:
    """Finds samplers that divide the positions of a Subset, which has other samples on each rank."""
    for events in (*training_epochs(evidence.trained), *evaluation_epochs(evidence.trained)):
        if all(event.get("divided") for event in events) and select_differently(events):
            what = "the positions of a Subset, which has other samples on each rank"
            message = f"The {events[0]['sampler']} divides {what}: some are used twice, and some never."
            return [fault(message, events[0]["step"], place=events[0]["place"])]
    return []
