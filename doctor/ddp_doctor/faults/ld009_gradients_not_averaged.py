"""LD009: gradients are not averaged."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.evidence.rank_comparison import names_of
from ddp_doctor.evidence.requirements import averages_gradients, optimizer_steps, unmet
from ddp_doctor.findings import Finding, fault, listed
from ddp_doctor.lazy import torch

TITLE = "Gradients are not averaged"
CAUSE = """\
DDP prepares its all-reduce in its own `forward`: without it, or with a call of `ddp.module(x)`, the outputs are right
but the gradients stay on their rank. Each rank trains its own model, and rank 0 saves only its own.
"""
WRONG = """\
ddp = DistributedDataParallel(model)
loss = model(images, labels)    # not the wrapper: nothing is averaged
loss.backward()
"""
FIX = """\
Wrap the model, call the wrapper, and dispatch in `forward`; with Fabric, use `model.mark_forward_method(...)`:
    loss = ddp(batch)       # not ddp.module.loss(batch)
"""
THREADS = ("Lightning-AI/pytorch-lightning#17424",)
EXPLAINS = "weights"
NEEDS = (optimizer_steps,)


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that stay on the rank that computed them."""
    found = first_divergence(evidence)
    if found is None:
        return unmet(evidence, averages_gradients)
    place, wrapped = found.place, evidence.ranks[0].of_kind("ddp")
    hooks = evidence.ranks[0].of_kind("comm_hook") if found.kind == "local" else []
    if hooks:
        place = hooks[0]["place"]
        what = f"the communication hook {hooks[0]['name']} returns it as it is"
    elif found.kind == "local" and not found.passes:
        # Where it is called, and leaves these gradients, it is LD010 or LD016.
        what = "DistributedDataParallel.forward is not called" if wrapped else "no model is wrapped"
        forwards = [event for event in evidence.ranks[0].of_kind("forward") if event["step"] == found.step]
        place = next((event["place"] for event in forwards if event["gradients"]), "") or place
    elif found.kind == "partly" and not wrapped:
        what = f"nothing averages those of {listed(found.parameters)}, unlike the others"
    elif found.kind == "other" and found.amount == 0.0 and (names := _initial_difference(evidence)):
        message = f"The ranks begin with different weights ({len(names)} parameters), and nothing makes them equal."
        return [fault(message, step=0, tensor=names[0], place=place)]
    else:
        return []
    return [fault(f"Each rank steps with its own gradient: {what}.", found.step, found.tensor, found.measured, place)]


def _initial_difference(evidence: Evidence) -> list[str]:
    """Returns the names of the parameters that differ between the ranks before the first step."""
    run = evidence.runs["ranks"]
    weights = {name: run.tensors(f"before/0/{key}") for key, name in names_of(run.ranks[0]).items()}
    return [name for name, found in weights.items() if not all(torch.equal(found[0], other) for other in found)]
