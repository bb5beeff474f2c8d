"""LD034: ranks decide differently."""

from __future__ import annotations

from ddp_doctor.evidence.communication import averaged_weights
from ddp_doctor.evidence.decisions import Decision, OwnValue, different_decisions, different_metrics, own_value
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.evidence.order import communicates
from ddp_doctor.evidence.requirements import communicating
from ddp_doctor.findings import Finding, fault

CODE = "LD034"
TITLE = "Ranks decide differently"
CAUSE = """\
Each rank sees its own samples, so a loss or a metric that is not reduced differs between ranks. If a rank stops, skips
or saves by it, the others do not. They wait for it in their next collective until the timeout ends the job with a
message about a closed connection, or the best checkpoint is the best for a part of the samples only. If a schedule
reduces the learning rate by it, or a rank skips an optimizer step, the weights differ from then on.
"""
WRONG = """\
if validation_loss(model, own_samples) > best:    # differs between the ranks
    break
"""
FIX = """\
Reduce the value before the decision, so that all ranks make the same decision:
    sums = torch.stack([loss_sum, count])
    dist.all_reduce(sums)
    if sums[0] / sums[1] > best: break
Or decide on rank 0, and broadcast the decision.
"""
THREADS = ("Lightning-AI/pytorch-lightning#379", "skorch-dev/skorch#737")
STRUCTURAL = True
EXPLAINS = "weights"
NEEDS = (communicating,)


def check(evidence: Evidence) -> list[Finding]:
    """Compares the conditions that decide when training ends and what is saved."""
    if not communicates(evidence):
        return []
    decisions = different_decisions(evidence)
    found = [_finding(evidence, decision) for decision in decisions if decision.stops or decision.saves]
    if not found and (value := own_value(evidence)):
        found = [_of_own_value(value)]
    # Ranks that average their weights may step unequally often. Other checks report weights that differ already.
    if not found and not averaged_weights(evidence) and first_divergence(evidence) is None:
        found = [_of_own_value(value)] if (value := own_value(evidence, skips=True)) else []
    return (found or _schedules(evidence))[:1]


def _schedules(evidence: Evidence) -> list[Finding]:
    """Finds a schedule that reduces the learning rate by another value on each rank."""
    found = different_metrics(evidence)
    if found is None:
        return []
    event, time, values = found
    message = (
        f"The schedule {event['name']} gets different values on the ranks at its step {time}, such as "
        f"{min(values):.6g} and {max(values):.6g}: each rank reduces its learning rate by its own value."
    )
    return [fault(message, event["step"], place=event["place"])]


def _of_own_value(found: OwnValue) -> Finding:
    first, second = found.ranks
    what = "whether the optimizer steps" if found.skips else "when training ends"
    how = "one of them can skip a step" if found.skips else "the ranks can end after different numbers of steps"
    message = (
        f"`{found.text}` decides {what}. It reads `{found.operand}`, which is {found.values[0]:.6g} on rank {first} "
        f"and {found.values[1]:.6g} on rank {second}: {how}."
    )
    return fault(message, place=found.place)


def _finding(evidence: Evidence, decision: Decision) -> Finding:
    first, second = decision.ranks
    message = (
        f"`{decision.text}` differs between ranks {first} and {second} at its evaluation {decision.time}: each rank "
        f"decides by its own value {'when training ends' if decision.stops else 'what is saved'}."
    )
    steps = [len(rank.of_kind("stepped")) for rank in evidence.ranks]
    ended = [rank for rank in evidence.ranks if rank.end["reached_end"]]
    step = None
    if decision.stops and len(ended) not in {0, len(steps)}:
        step = len(ended[0].of_kind("stepped"))
        message += f" Rank {ended[0].rank} stops after {step} optimizer steps, and the others wait for it."
    return fault(message, step, place=decision.place)
