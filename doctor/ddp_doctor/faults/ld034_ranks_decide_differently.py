"""LD034: ranks decide differently."""

from __future__ import annotations

from ddp_doctor.evidence.communication import averaged_weights
from ddp_doctor.evidence.decisions import (
    Condition,
    Decision,
    OwnValue,
    different_decisions,
    different_metrics,
    own_value,
)
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.evidence.order import names
from ddp_doctor.evidence.requirements import communicating
from ddp_doctor.findings import Finding, fault

CODE = "LD034"
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
STRUCTURAL = True
EXPLAINS = "weights"
NEEDS = (communicating,)


def check(evidence: Evidence) -> list[Finding]:
    """Compares the conditions that decide when training ends and what is saved."""
    decisions = different_decisions(evidence)
    found = next((_finding(evidence, decision) for decision in decisions if decision.stops or decision.saves), None)
    kinds = ((Condition.ends_training, "when training ends"), (Condition.keeps_weights, "which weights are kept"))
    for decides, what in kinds:
        if not found and (value := own_value(evidence, decides)):
            found = _of_own_value(value, what)
    # Ranks that average their weights may step unequally often. Other checks report weights that differ already.
    if not found and not averaged_weights(evidence) and first_divergence(evidence) is None:
        value = own_value(evidence, Condition.skips_step)
        found = _of_own_value(value, "whether the optimizer steps") if value else None
    found = found or _of_schedule(evidence)
    return [found] if found else []


def _of_schedule(evidence: Evidence) -> Finding | None:
    """Finds a schedule that reduces the learning rate by another value on each rank."""
    found = different_metrics(evidence)
    if found is None:
        return None
    event, values = found
    shown = " and ".join(f"{value:.6g}" for value in values[:2])
    message = f"The schedule {event['name']} gets another value on each rank, such as {shown}."
    return fault(message, event["step"], place=event["place"])


def _of_own_value(found: OwnValue, what: str) -> Finding:
    values = " and ".join(
        f"{number:.6g} on rank {rank}" for number, rank in zip(found.values, found.ranks, strict=True)
    )
    return fault(f"`{found.text}` decides {what}. It reads `{found.operand}`, which is {values}.", place=found.place)


def _finding(evidence: Evidence, decision: Decision) -> Finding:
    message = (
        f"`{decision.text}` differs between {names(decision.ranks)} at its evaluation {decision.time}: each rank "
        f"decides by its own value {'when training ends' if decision.stops else 'what is saved'}."
    )
    steps = [len(rank.of_kind("stepped")) for rank in evidence.ranks]
    ended = [rank for rank in evidence.ranks if rank.end["reached_end"]]
    step = None
    if decision.stops and len(ended) not in {0, len(steps)}:
        step = len(ended[0].of_kind("stepped"))
        message += f" Rank {ended[0].rank} stops after {step} optimizer steps, and the others wait for it."
    return fault(message, step, place=decision.place)
