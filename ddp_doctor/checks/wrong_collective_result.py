"""LD033: a collective returns wrong values."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.reduction import wrong_reduction
from ddp_doctor.evidence.requirements import one_pass, optimizer_steps, wrapped
from ddp_doctor.findings import Finding, fault

CODE = "LD033"
TITLE = "A collective returns wrong values"
CAUSE = (
    "The gradients that the optimizers get are not the mean of the ranks' gradients: on a rank they are zero, or "
    "changed between the reduction and the step. Faulty hardware, drivers and communication hooks do this "
    "without an error."
)
WRONG = """\
dist.all_reduce(gradient)    # returns something other than the sum over the ranks
"""
FIX = "Compare the result of an all-reduce with a known one before the training, and check hooks and the network."
THREADS = ("pytorch/pytorch#84803", "pytorch/pytorch#96600")
STRUCTURAL = True
NEEDS = (wrapped, optimizer_steps, one_pass)


def check(evidence: Evidence) -> list[Finding]:
    """Finds averaged gradients that are not a combination of those of the ranks."""
    found = wrong_reduction(evidence)
    if found is None:
        return []
    what = "zero" if found.zero else "not a combination of those that the ranks computed"
    message = (
        f"The gradient that rank {found.rank} steps with is {what} for {len(found.parameters)} parameters, although "
        "DistributedDataParallel has averaged it: a collective or a communication hook returned wrong values."
    )
    return [fault(message, found.step, found.parameters[0], f"{found.amount:.1e} of the gradient", found.place)]
