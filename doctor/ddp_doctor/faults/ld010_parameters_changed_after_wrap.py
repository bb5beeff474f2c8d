"""LD010: parameters were changed after the wrap."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.evidence.requirements import averages_gradients, optimizer_steps, wrapped
from ddp_doctor.findings import Finding, fault, listed

TITLE = "Parameters were changed after the wrap"
CAUSE = """\
DDP registers its hooks on the parameters that exist when it wraps the module: one that is assigned, moved, converted or
unfrozen later, or that belongs to another module, is never averaged. The ranks drift apart in it without a message.
"""
WRONG = """\
model = DistributedDataParallel(model)
model.module.head = nn.Linear(512, classes)    # DDP does not know its parameters
"""
FIX = """\
Change the module before wrapping it, and wrap it again after a change:
    model.head = nn.Linear(512, classes).to(device)
    model = DistributedDataParallel(model)
"""
THREADS = ("pytorch/pytorch#12603", "pytorch/pytorch#104336")
EXPLAINS = "weights"
NEEDS = (wrapped, optimizer_steps, averages_gradients)


def check(evidence: Evidence) -> list[Finding]:
    """Finds parameters that DistributedDataParallel does not know, although its forward pass is called."""
    found = first_divergence(evidence)
    # A hook may return its own gradient to each rank.
    kinds = {"partly"} if evidence.ranks[0].of_kind("comm_hook") else {"partly", "local"}
    if found is None or found.kind not in kinds or not found.passes or not found.passes[-1]["synchronizes"]:
        return []
    message = f"DistributedDataParallel does not know {listed(found.parameters)}: each rank uses its own gradient."
    return [fault(message, found.step, found.tensor, found.measured, found.place)]
