"""LD036: ranks have different weights, or others than one process, and no other check knows why."""

from __future__ import annotations

import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import Divergence, first_divergence, later_divergence, loss_place
from ddp_doctor.evidence.order import names
from ddp_doctor.evidence.requirements import averages_gradients, optimizer_steps
from ddp_doctor.findings import Finding, cannot_tell, fault, listed, unclear

CODE = "LD036"
TITLE = "Ranks have different weights"
CAUSE = """\
The ranks train different weights, although they average their gradients: one rank alone restores its optimizer, loads
other weights, or changes its learning rate because of its own loss. Or a network that is not trained, such as a
teacher, a target or an average, differs between the ranks: DDP makes the weights of the wrapped module equal, and of no
other one. Or the program changes the weights by itself every few steps, with the random numbers or the statistics of
each rank. The same check reports every difference between the ranks, and between them and one process, that no other
check explains.
"""
WRONG = """\
torch.manual_seed(seed + rank)
online = Network()
target = copy.deepcopy(online)    # each rank has its own target
online = DistributedDataParallel(online)
"""
FIX = """\
Load on all ranks, and copy a network after DistributedDataParallel has made its weights equal, or broadcast it:
    target = copy.deepcopy(online.module)
Find what the program does between the step that the report names and the one before: what it draws there must come
from a generator with the same seed on all ranks, or be broadcast.
"""
THREADS = ("iCog-Labs-Dev/PC-Transformers#135",)
STRUCTURAL = False
NEEDS = (optimizer_steps, averages_gradients)


def check(evidence: Evidence) -> list[Finding]:
    """Reports what differs, if the checks before it have said nothing about it."""
    found = first_divergence(evidence)
    if held := None if found else _held_differently(evidence):
        return [held]
    if later := None if found or evidence.faulty else later_divergence(evidence):
        message = (
            f"After optimizer step {later.step}, the ranks have different weights. All steps before agree: what the "
            "program does every few steps only, or from some step on, differs between the ranks."
            f"{_rates(evidence, later.step)}"
        )
        return [fault(message, later.step, later.tensor, later.measured, later.place)]
    if evidence.explained:
        return []
    if found and found.kind != "steps":
        message = f"After optimizer step {found.step}, the ranks have different weights ({listed(found.parameters)})"
        message += _cause(evidence, found)
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


def _held_differently(evidence: Evidence) -> Finding | None:
    """Finds the first call of a network that all ranks make with different weights."""
    calls = ([event for event in rank.of_kind("forward") if event.get("held")] for rank in evidence.trained)
    for first, *others in zip(*calls, strict=False):
        if any(call[key] != first[key] for call in others for key in ("module", "place", "step")):
            # The ranks call other networks, so that their calls cannot be compared.
            return None
        for rank, call in enumerate(others, 1):
            if call["held"] != first["held"]:
                message = (
                    f"The {first['module']} is called on all ranks and is not trained, such as a teacher or an "
                    f"average, but its weights differ between {names([0, rank])}."
                )
                return fault(message, first["step"], place=first["place"])
    return None


def _rates(evidence: Evidence, step: int) -> str:
    """Returns the learning rates of a step of the longer run, if they differ between the ranks."""
    many = evidence.worked("many steps")
    events = {rank.rank: rank.of_kind("step")[step : step + 1] for rank in many.ranks} if many else {}
    rates = {rank: event["lr"] for rank, found in events.items() for event in found}
    # The first parameter group of an optimizer whose learning rates differ.
    group = next((group for group in zip(*rates.values(), strict=False) if len(set(group)) > 1), None)
    if group is None:
        return ""
    shown = ", ".join(f"rank {rank} {rate:.4g}" for rank, rate in zip(rates, group, strict=True))
    return f" The learning rates of this step differ: {shown}. Decide about them from a reduced value, on all ranks."


def _cause(evidence: Evidence, found: Divergence) -> str:
    """Returns what is known of the cause of different weights."""
    ranks = evidence.trained
    prefix = f"before/{found.step}/"
    keys = [name.removeprefix(prefix) for name in ranks[0].tensors if name.startswith(prefix)]
    equal = [
        all(torch.equal(ranks[0].tensors[name], rank.tensors.get(name, torch.empty(0))) for rank in ranks[1:])
        for key in keys
        for name in (f"{what}/{found.step}/{key}" for what in ("before", "applied"))
        if name in ranks[0].tensors
    ]
    if not equal or not all(equal):
        return ", and no other check knows the cause."
    rates = {tuple(rank.of_kind("step")[found.step]["lr"]) for rank in ranks}
    if len(rates) > 1:
        shown = " and ".join(f"{rate[0]:.4g}" for rate in sorted(rates))
        return f". The weights and gradients were equal before, but the learning rates are {shown}."
    return (
        ". The weights and gradients were equal before: the states of the optimizers differ, as if one rank alone had "
        "restored its own."
    )
