"""LD035: a frozen batch norm still updates."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.requirements import batch_norm
from ddp_doctor.findings import Finding, fault, listed

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
    for record in evidence.trained:
        forwards = [event for event in record.of_kind("forward") if event["gradients"]]
        # A discriminator is frozen for a while, and the encoder of a momentum teacher changes without gradients.
        for kind in {event["module"] for event in forwards}:
            passes = [event for event in forwards if event["module"] == kind]
            norms = [event.get("frozen_norms", {}) for event in passes]
            same = [name for name in norms[0] if all(own.get(name) == norms[0][name] for own in norms)]
            if same and len({event["step"] for event in passes}) > 1:
                message = f"{listed(same)} of {kind} changes its running statistics, although its part is frozen."
                return [fault(message, passes[0]["step"], same[0], place=passes[0]["place"])]
    return []
