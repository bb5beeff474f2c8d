"""LD029: parameters are not used by the loss."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.findings import Finding, fault
from ddp_doctor.listing import listed
from ddp_doctor.records.run import RankRecord

CODE = "LD029"
TITLE = "Parameters are not used by the loss"
CAUSE = """\
DDP waits for the gradient of every parameter. A parameter that does not influence the loss never has one, and
torch ends the next step with an error that gives numbers, not names. With `find_unused_parameters=True`, the
error disappears, but parameters that were forgotten by mistake never train.
"""
FIX = """\
Remove or freeze the parameters before wrapping:
    model.head.requires_grad_(False)
If they are used only in some steps: `DistributedDataParallel(model, find_unused_parameters=True)`.
"""
THREADS = ("Lightning-AI/pytorch-lightning#17212", "Lightning-AI/pytorch-lightning#21794")
STRUCTURAL = True
_WORDS = ("find_unused_parameters", "parameters that were not used in producing")


def check(evidence: Evidence) -> list[Finding]:
    """Names the parameters about which DistributedDataParallel complains."""
    failed = next((rank for rank in evidence.ranks if rank.error and _is_about_unused(rank.error["message"])), None)
    if failed is None:
        return []
    step = len(failed.of_kind("step"))
    run = evidence.run("unused parameters found", interventions={"find_unused": True})
    unused = [_without_gradient(record) for record in run.ranks] if run.worked else []
    names = sorted(set().union(*unused))
    places = [event["place"] for kind in ("forward", "log", "ddp") for event in failed.of_kind(kind) if event["place"]]
    place = places[0] if places else ""
    if not names:
        message = (
            "DistributedDataParallel waits for gradients of parameters that the loss of step "
            f"{max(step - 1, 0)} does not use."
        )
        return [fault(message, step=max(step - 1, 0), place=place)]
    message = f"The loss does not use {listed(names)}, so DistributedDataParallel waits for their gradients."
    if any(part != unused[0] for part in unused):
        message += f" Rank 0 does not use {listed(sorted(unused[0])) or 'none'}; the other ranks differ."
    amount = f"{len(names)} parameters"
    proof = (
        f"With find_unused_parameters=True, the ranks take {len(run.ranks[0].of_kind('step'))} steps instead of {step}."
    )
    return [fault(message, step=max(step - 1, 0), tensor=names[0], amount=amount, place=place, proof=proof)]


def _is_about_unused(message: str) -> bool:
    return any(words in message for words in _WORDS)


def _without_gradient(record: RankRecord) -> set[str]:
    """Returns the parameters that get no gradient on this rank in the first step."""
    found: set[str] = set()
    for event in record.of_kind("step")[:1]:
        trainable = {key: name for key, name in event["names"].items() if name not in event["frozen"]}
        found |= {name for key, name in trainable.items() if f"local/{event['step']}/{key}" not in record.tensors}
    return found
