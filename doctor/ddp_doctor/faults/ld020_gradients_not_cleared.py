"""LD020: gradients are never cleared."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import two_steps
from ddp_doctor.findings import Finding, fault, listed

CODE = "LD020"
TITLE = "Gradients are never cleared"
CAUSE = """\
`backward()` adds to the gradients: without `zero_grad()` after the step, each step applies the sum of all earlier ones.
This resembles a strong momentum, so that training may still make progress.
"""
WRONG = """\
loss.backward()
optimizer.step()    # the gradients of all steps so far are added
"""
FIX = """\
Set the gradients to zero after each optimizer step:
    optimizer.step()
    optimizer.zero_grad()
"""
THREADS = ("https://stackoverflow.com/questions/60335387", "facebookresearch/nwm#16")
STRUCTURAL = True
NEEDS = (two_steps,)


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that an optimizer has applied, and that are present at the next backward pass."""
    for event in (event for record in evidence.trained for event in record.of_kind("step") if event["stale"]):
        message = (
            f"The gradients of {listed(event['stale'])} are those of an earlier step when the backward pass of step "
            f"{event['step']} begins, so they are applied again."
        )
        return [fault(message, event["step"], event["stale"][0], place=event["place"])]
    return []
