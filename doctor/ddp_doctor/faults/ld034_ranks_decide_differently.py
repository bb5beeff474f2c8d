"""LD034: ranks decide differently."""

from ddp_doctor.evidence.communication import averaged_weights
from ddp_doctor.evidence.decisions import STEPS, decisions, different_metrics
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.evidence.requirements import communicating
from ddp_doctor.findings import Finding, fault

TITLE = "Ranks decide differently"
CAUSE = """\
Each rank sees its own samples, so that a loss that is not reduced differs: if a rank stops, skips, saves or changes its
learning rate by it, the others do not. They wait for it until the timeout, or train other weights.
"""
WRONG = """\
if validation_loss(model, own_samples) > best:    # differs between the ranks
    break
"""
FIX = """\
Reduce the value before the decision, or decide on rank 0, and broadcast the decision:
    sums = torch.stack([loss_sum, count])
    dist.all_reduce(sums)
    if sums[0] / sums[1] > best: break
"""
THREADS = ("Lightning-AI/pytorch-lightning#379", "skorch-dev/skorch#737")
EXPLAINS = "weights"
NEEDS = (communicating,)


def check(evidence: Evidence) -> list[Finding]:
    """Compares the conditions that decide when training ends, what is saved, and whether the optimizer steps."""
    found = decisions(evidence)
    # Ranks that average their weights may step unequally often. Other checks report weights that differ already.
    if averaged_weights(evidence.worked("ranks")) or first_divergence(evidence):
        found = [one for one in found if one.decides != STEPS]
    for one in found[:1]:
        message = f"By `{one.text}`, each rank decides by a value of its own {one.decides}: {one.how}."
        return [fault(message, place=one.place)]
    if schedule := different_metrics(evidence):
        event, values = schedule
        shown = " and ".join(f"{value:.6g}" for value in values[:2])
        message = f"The schedule {event['name']} gets another value on each rank, such as {shown}."
        return [fault(message, event["step"], place=event["place"])]
    return []
