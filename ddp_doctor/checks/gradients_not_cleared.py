"""LD020: gradients are never cleared."""

from __future__ import annotations

from typing import Any

import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, fault
from ddp_doctor.listing import listed
from ddp_doctor.records.run import Run

CODE = "LD020"
TITLE = "Gradients are never cleared"
CAUSE = """\
`backward()` adds to the gradients. Without `zero_grad()` after the step, each step applies the sum of all
earlier gradients. This resembles a strong momentum, so that training may still make progress. In an
accumulation window, gradients are left on purpose.
"""
FIX = """\
Set the gradients to zero after each optimizer step:
    optimizer.step()
    optimizer.zero_grad()
"""
THREADS = ("https://stackoverflow.com/questions/60335387", "facebookresearch/nwm#16")
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that an optimizer has applied, and that are present at the next backward pass."""
    run = evidence.worked("ranks")
    if run is None:
        return []
    for record in run.ranks:
        for event in record.of_kind("step"):
            if event["stale"]:
                return [_finding(evidence, run, event)]
    return []


def _finding(evidence: Evidence, run: Run, event: dict[str, Any]) -> Finding:
    names = event["stale"]
    message = (
        f"The gradients of {listed(names)} are those of an earlier step when the backward pass of step {event['step']} "
        "begins, so they are applied again."
    )
    amount, proof = _left(run, event)
    place = event["place"]
    return fault(message, step=event["step"], tensor=names[0], amount=amount, place=place, proof=proof)


def _left(run: Run, event: dict[str, Any]) -> tuple[str, str]:
    """Returns how much is left of earlier steps, and what the gradient is without it."""
    step = event["step"]
    own, applied, before = [], [], []
    for key, name in event["names"].items():
        local = [record.tensors.get(f"local/{step}/{key}") for record in run.ranks]
        both = [run.ranks[0].tensors.get(f"applied/{number}/{key}") for number in (step, step - 1)]
        if name in event["stale"] and all(part is not None for part in [*local, *both]):
            own.append(torch.stack([part.flatten() for part in local if part is not None]).mean(0))
            applied.append(both[0].flatten() if both[0] is not None else torch.zeros(0))
            before.append(both[1].flatten() if both[1] is not None else torch.zeros(0))
    if not own:
        return "", ""
    mine, given, left = torch.cat(own), torch.cat(applied), torch.cat(before)
    size = float(mine.norm()) or 1.0
    difference = float((given - mine).norm()) / size
    rest = float((given - left - mine).norm()) / size
    proof = ""
    if rest < 1e-3 * difference:
        proof = (
            f"Without the gradient of step {step - 1}, the difference to the mean of the ranks' gradients falls from "
            f"{difference:.1e} to {rest:.1e}."
        )
    return f"{difference:.1e} of the gradient of the step", proof
