"""LD036: ranks have different weights, or others than one process, and no other check knows why."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, later_divergence, loss_place
from ddp_doctor.evidence.order import names
from ddp_doctor.evidence.requirements import averages_gradients, compared, optimizer_steps, unmet
from ddp_doctor.findings import Finding, fault, listed, unclear

TITLE = "Ranks have different weights"
CAUSE = """\
One rank alone loads something, a network that is not trained, such as a teacher, differs, or the program changes
weights every few steps. Every difference of the ranks, also to one process, that no other check explains is reported.
"""
WRONG = """\
target = copy.deepcopy(online)    # each rank has its own target
online = DistributedDataParallel(online)
"""
FIX = """\
Load on all ranks, and copy a network after DDP has made its weights equal, or broadcast it:
    target = copy.deepcopy(online.module)
"""
THREADS = ("iCog-Labs-Dev/PC-Transformers#135",)
NUMERIC = True
NEEDS = (optimizer_steps, averages_gradients)


def check(evidence: Evidence) -> list[Finding]:
    """Reports what differs, if the checks before it have said nothing about it."""
    found = first_divergence(evidence)
    if held := None if found else _held_differently(evidence):
        return [held]
    if later := None if found or evidence.faulty else later_divergence(evidence):
        message = f"After optimizer step {later.step}, weights differ by what the program does every few steps only."
        return [fault(message, later.step, later.tensor, later.measured, later.place)]
    if evidence.explained:
        return []
    if found and found.kind != "steps":
        message = f"After optimizer step {found.step}, the ranks have different weights ({listed(found.parameters)})."
        if found.amount == 0.0:
            message += " The gradients were equal: the weights before, the rates or the optimizers are not."
        return [fault(message, found.step, found.tensor, found.measured, found.place)]
    reference = evidence.reference
    if reference.differs and not found:
        message = "The ranks have another gradient than one process: a fault, or what the doctor does not repeat there."
        return [unclear(message, reference.step, reference.tensor, reference.measured, loss_place(evidence))]
    return unmet(evidence, compared)


def _held_differently(evidence: Evidence) -> Finding | None:
    """Finds the first call of a network that all ranks make with different weights."""
    calls = ([event for event in rank.of_kind("forward") if event.get("held")] for rank in evidence.trained)
    for first, *others in zip(*calls, strict=False):
        if any(call[key] != first[key] for call in others for key in ("module", "place", "step")):
            # The ranks call other networks, so that their calls cannot be compared.
            return None
        for rank, call in enumerate(others, 1):
            if call["held"] != first["held"]:
                message = f"The {first['module']} is not trained, but its weights differ between {names([0, rank])}."
                return fault(message, first["step"], place=first["place"])
    return None
