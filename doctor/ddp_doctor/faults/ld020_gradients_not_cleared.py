"""LD020: gradients are never cleared."""

from __future__ import annotations

from typing import Any

import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import two_steps
from ddp_doctor.findings import Finding, fault, listed
from ddp_doctor.records.run import Run

CODE = "LD020"
TITLE = "Gradients are never cleared"
CAUSE = """\
`backward()` adds to the gradients. Without `zero_grad()` after the step, each step applies the sum of all
earlier gradients. This resembles a strong momentum, so that training may still make progress. In an
accumulation window, gradients are left on purpose.
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
        amount, proof = _left(evidence.runs["ranks"], event)
        return [fault(message, event["step"], event["stale"][0], amount, event["place"], proof)]
    return []


def _left(run: Run, event: dict[str, Any]) -> tuple[str, str]:
    """Returns how much is left of earlier steps, and what the gradient is without it."""
    step, parts = event["step"], []
    for key in (key for key, name in event["names"].items() if name in event["stale"]):
        tensors = [
            run.tensors(name) for name in (f"local/{step}/{key}", f"applied/{step}/{key}", f"applied/{step - 1}/{key}")
        ]
        if all(tensors):
            parts.append([torch.stack(tensors[0]).mean(0).flatten(), tensors[1][0].flatten(), tensors[2][0].flatten()])
    if not parts:
        return "", ""
    mine, given, before = (torch.cat(vectors) for vectors in zip(*parts, strict=True))
    size = float(mine.norm()) or 1.0
    difference, rest = float((given - mine).norm()) / size, float((given - before - mine).norm()) / size
    proof = (
        f"Without the gradient of step {step - 1}, the difference to the mean of the ranks' gradients falls from "
        f"{difference:.1e} to {rest:.1e}."
    )
    return f"{difference:.1e} of the gradient of the step", proof if rest < 1e-3 * difference else ""
