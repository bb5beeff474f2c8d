"""LD010: parameters were changed after the wrap."""

from __future__ import annotations

from lit_mnist.doctor.evidence import Evidence, fault
from lit_mnist.doctor.findings import Finding
from lit_mnist.doctor.gradients import first_divergence, windows, wraps

TITLE = "Parameters were changed after the wrap"
CAUSE = (
    "DistributedDataParallel averages the parameters that it found when it was created. Layers that are "
    "replaced, unfrozen or moved later keep the gradient of each rank, so the ranks drift apart in these "
    "layers only."
)
FIX = "Change the model first, then wrap it, then create the optimizer."
THREADS = (
    "pytorch/pytorch#12603",
    "pytorch/pytorch#104336",
)
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Finds parameters that DistributedDataParallel does not know, although its forward pass is called."""
    found = first_divergence(evidence)
    if found is None or found.kind not in {"partly", "local"}:
        return []
    run = evidence.runs["ranks"]
    passes = windows(run.ranks[0])[found.step] if found.step < len(windows(run.ranks[0])) else []
    if not passes or not passes[-1]["synchronizes"]:
        return []
    known = {name for wrapped in wraps(run) for name in wrapped["parameters"]}
    new = [name for name in found.parameters if name not in known]
    what = "which were frozen at the wrap or added after it" if new else "which were replaced after the wrap"
    message = (
        f"{len(found.parameters)} parameters that DistributedDataParallel does not average are trained with the "
        f"gradient of each rank alone, {what}: {', '.join(found.parameters[:5])}."
    )
    amount = f"their gradients differ between two ranks by {found.amount:.1e}"
    place = evidence.relative(found.place)
    return [fault("LD010", message, step=found.step, tensor=found.parameters[0], amount=amount, place=place)]
