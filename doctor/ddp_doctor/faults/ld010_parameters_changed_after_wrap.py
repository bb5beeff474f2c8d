"""LD010: parameters were changed after the wrap."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.evidence.requirements import averages_gradients, optimizer_steps, wrapped
from ddp_doctor.findings import Finding, fault

CODE = "LD010"
TITLE = "Parameters were changed after the wrap"
CAUSE = """\
DDP registers its hooks on the parameters that exist when it wraps the module. A parameter that is assigned,
moved or converted later is a new tensor without a hook. Its gradient is never averaged, and the ranks drift
apart in this parameter. No message appears, and the loss of each rank falls. The same holds for a module with
parameters of its own that is not wrapped, such as a loss with class centers.
"""
WRONG = """\
model = DistributedDataParallel(model)
model.module.head = nn.Linear(512, classes)    # DDP does not know its parameters
"""
FIX = """\
Change the module before wrapping it, and wrap it again after a change:
    model = Net().to(device)
    model.head = nn.Linear(512, classes).to(device)
    model = DistributedDataParallel(model)
"""
THREADS = ("pytorch/pytorch#12603", "pytorch/pytorch#104336")
STRUCTURAL = True
EXPLAINS = "weights"
NEEDS = (wrapped, optimizer_steps, averages_gradients)


def check(evidence: Evidence) -> list[Finding]:
    """Finds parameters that DistributedDataParallel does not know, although its forward pass is called."""
    found = first_divergence(evidence)
    if found is None or found.kind not in {"partly", "local"} or found.hook:
        return []
    if not found.passes or not found.passes[-1]["synchronizes"]:
        return []
    known = {name for module in evidence.ranks[0].of_kind("ddp") for name in module["parameters"]}
    new = any(name not in known for name in found.parameters)
    what = "of no wrapped module, or frozen or not yet there at the wrap" if new else "replaced after the wrap"
    message = (
        f"Parameters that DistributedDataParallel does not average are trained with the gradient of each rank alone "
        f"({len(found.parameters)}, {what}): {', '.join(found.parameters[:5])}."
    )
    amount = f"their gradients differ between two ranks by {found.amount:.1e}"
    return [fault(message, found.step, found.tensor, amount, found.place)]
