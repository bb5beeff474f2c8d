"""LD035: a frozen batch norm still updates."""

from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import batch_norm
from ddp_doctor.findings import Finding, fault, listed
from ddp_doctor.records.run import RankRecord

TITLE = "A frozen batch norm still updates"
CAUSE = """\
`requires_grad_(False)` freezes parameters, but not the running statistics of a batch norm: in training mode they follow
the new data. The frozen backbone then computes other features from step to step.
"""
WRONG = """\
for parameter in model.backbone.parameters():
    parameter.requires_grad_(False)
model.train()    # the running statistics of the backbone still change
"""
FIX = """\
Put the frozen part into evaluation mode after each call of train(), in Lightning in `on_train_epoch_start`:
    model.train()
    model.backbone.eval()
"""
THREADS = ("pytorch/pytorch#86590", "lightly-ai/lightly#1438")
NEEDS = (batch_norm,)


def check(evidence: Evidence) -> list[Finding]:
    """Finds batch norms in training mode within a part whose weights never change while others are trained."""
    for event, names in filter(None, map(_frozen, evidence.trained)):
        message = f"{listed(names)} of {event['module']} changes its running statistics, although its part is frozen."
        return [fault(message, event["step"], names[0], place=event["place"])]
    return []


def _frozen(record: RankRecord) -> tuple[dict[str, Any], list[str]] | None:
    """Returns the first forward pass with such layers, and their names."""
    forwards = [event for event in record.of_kind("forward") if event["gradients"]]
    # A discriminator is frozen for a while, and the encoder of a momentum teacher changes without gradients.
    for kind in {event["module"] for event in forwards}:
        passes = [event for event in forwards if event["module"] == kind]
        if len({event["step"] for event in passes}) < 2:
            continue
        first = passes[0].get("frozen_norms", {})
        same = [
            name for name in first if all(event.get("frozen_norms", {}).get(name) == first[name] for event in passes)
        ]
        if same and any(rank_step["names"] for rank_step in record.of_kind("step")):
            return passes[0], same
    return None
