"""LD005: the split differs between ranks."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import communicates, leak
from ddp_doctor.evidence.requirements import communicating, evaluation, training_loader
from ddp_doctor.findings import Finding, fault

CODE = "LD005"
TITLE = "The split differs between ranks"
CAUSE = """\
`random_split` draws from the global generator. If the ranks are not seeded equally at that moment, each rank
makes a different split, and the validation samples of one rank are training samples of another. The model
trains on its validation set, and the validation metric is too good.
"""
WRONG = """\
train, validation = random_split(dataset, [0.9, 0.1])    # drawn on each rank for itself
"""
FIX = """\
Split with a separate generator:
    random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))
"""
THREADS = ("Lightning-AI/pytorch-lightning#7728", "Lightning-AI/pytorch-lightning#18638")
STRUCTURAL = True
NEEDS = (communicating, evaluation, training_loader)


def check(evidence: Evidence) -> list[Finding]:
    """Looks for the training samples of each rank among the validation samples of the others."""
    found = leak(evidence.ranks)
    if found is None or not communicates(evidence):
        return []
    message = (
        f"Rank {found.trains} trains with {found.shared} of the {found.of} samples with which rank {found.validates} "
        f"validates, although no rank validates with its own: each rank splits the data in its own way."
    )
    run = evidence.run("one seed", same_seed=True)
    proof = "with one seed on all ranks there are none" if run.worked and leak(run.ranks) is None else ""
    amount = f"{found.shared} of {found.of} samples"
    return [fault(message, found.event["step"], "", amount, found.event["place"], proof)]
