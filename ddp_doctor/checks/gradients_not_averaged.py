"""LD009: gradients are not averaged."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, initial_difference, local_hook, windows, wraps
from ddp_doctor.findings import Finding, fault

CODE = "LD009"
TITLE = "Gradients are not averaged"
CAUSE = """\
DDP prepares its all-reduce in its own `forward`. A call of `ddp.module(x)`, or of another method of the
module, computes the same output and the same local gradient, but the gradients are not averaged reliably.
Each rank trains a model of its own, and rank 0 saves only its own.
"""
FIX = """\
Call the wrapper, and dispatch in `forward`:
    loss = ddp(batch)       # not ddp.module.loss(batch)
With Fabric, use `model.mark_forward_method(...)` for other methods.
"""
THREADS = ("Lightning-AI/pytorch-lightning#17424",)
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that stay on the rank that computed them."""
    found = first_divergence(evidence)
    if found is None:
        return []
    run = evidence.runs["ranks"]
    names = initial_difference(evidence)
    if hook := local_hook(evidence, found.step):
        message = (
            f"Each rank steps with its own gradient: the communication hook {hook.name} returns the gradient of the "
            "rank as it is."
        )
        tensor, amount = found.parameters[0], f"the gradients of two ranks differ by {found.amount:.1e}"
        return [fault(message, step=found.step, tensor=tensor, amount=amount, place=hook.place)]
    if found.kind == "local":
        ddp = "DistributedDataParallel.forward is not called" if wraps(run) else "nothing averages the gradients"
        if any(windows(run.ranks[0])[found.step : found.step + 1]) and windows(run.ranks[0])[found.step]:
            # It is called, and leaves these gradients: LD010 or LD016.
            return []
        message = f"Each rank steps with its own gradient: {ddp}."
    elif found.kind == "other" and names and found.amount == 0.0:
        message = f"The ranks begin with different weights ({len(names)} parameters), and nothing makes them equal."
        return [fault(message, step=0, tensor=names[0], place=found.place)]
    else:
        return []
    amount = f"the gradients of two ranks differ by {found.amount:.1e}"
    place = _forward_place(evidence, found.step) or found.place
    return [fault(message, step=found.step, tensor=found.parameters[0], amount=amount, place=place)]


def _forward_place(evidence: Evidence, step: int) -> str:
    events = evidence.ranks[0].of_kind("forward")
    return next((event["place"] for event in events if event["step"] == step and event["gradients"]), "")
