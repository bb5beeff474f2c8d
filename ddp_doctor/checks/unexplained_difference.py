"""LD036: a difference that no other check explains."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place
from ddp_doctor.evidence.requirements import averages_gradients, optimizer_steps
from ddp_doctor.findings import Finding, cannot_tell, fault, listed, unclear

CODE = "LD036"
TITLE = "A difference without a known cause"
CAUSE = """\
The ranks train different weights, or another gradient than one process computes from the same samples, weights and
random numbers, and no other check names the cause. The doctor then reports what it measured.
"""
WRONG = """\
if rank == 0:
    model.load_state_dict(best)    # in the middle of training: the other ranks continue with other weights
"""
FIX = """\
Find the first step and the parameter that the report names, and what the program does between it and the step
before. Compare the weights of the ranks there:
    for tensor in model.state_dict().values():
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor)
"""
THREADS = ("iCog-Labs-Dev/PC-Transformers#135",)
STRUCTURAL = False
NEEDS = (optimizer_steps, averages_gradients)


def check(evidence: Evidence) -> list[Finding]:
    """Reports what differs, if the checks before it have said nothing about it."""
    if evidence.explained:
        return []
    found = first_divergence(evidence)
    if found and found.kind != "steps":
        message = (
            f"After optimizer step {found.step}, the ranks have different weights ({listed(found.parameters)}), and no "
            "other check knows the cause."
        )
        return [fault(message, found.step, found.tensor, found.measured, found.place)]
    reference = evidence.reference
    if reference.cannot:
        return [cannot_tell(f"The ranks and one process were not compared: {reference.cannot}.")]
    if reference.differs and not found:
        message = (
            "The ranks train with another gradient than one process with the same samples, and no other check knows "
            "the cause. It can be a fault, or something that the doctor does not repeat on one process."
        )
        return [unclear(message, reference.step, reference.tensor, reference.measured, loss_place(evidence))]
    return []
