"""LD011: one rank clips or steps differently."""

from ddp_doctor.evidence.decisions import different_metrics, stopping_decision
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, skipping_rank
from ddp_doctor.evidence.rank_comparison import SAME
from ddp_doctor.evidence.requirements import averages_gradients, optimizer_steps, unmet
from ddp_doctor.findings import Finding, fault

TITLE = "One rank clips or steps differently"
CAUSE = """\
DDP gives all ranks the same gradient, but does not compare their weights. If one rank clips, scales, skips or steps
differently, its weights differ from then on, and later gradients are averages over different models.
"""
WRONG = """\
if dist.get_rank() == 0:
    clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""
FIX = """\
Take every decision about the step on all ranks, from a reduced value, after `backward()`:
    clip_grad_norm_(model.parameters(), 1.0)    # on each rank
"""
THREADS = ("deepspeedai/DeepSpeed#1801",)
EXPLAINS = "weights"
NEEDS = (optimizer_steps,)


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that one rank changes, and steps that one rank skips."""
    found = first_divergence(evidence)
    if found is None:
        return unmet(evidence, averages_gradients) or own_clip(evidence)
    clips = [[event for event in rank.of_kind("clip") if event["step"] == found.step] for rank in evidence.ranks]
    rates = [[event["lr"] for event in rank.of_kind("step")][found.step : found.step + 1] for rank in evidence.ranks]
    place = found.place
    if len({len(clip) for clip in clips}) > 1:
        clip = next(clip[0] for clip in clips if clip)
        place, message = clip["place"], f"Not all ranks clip the gradients with {clip['function']}."
    elif (found.kind == "steps" and stopping_decision(evidence)) or different_metrics(evidence):
        # LD034.
        return []
    elif found.kind == "steps":
        counts = ", ".join(f"rank {rank.rank} {len(rank.of_kind('stepped'))}" for rank in evidence.ranks)
        message = f"The ranks step unequally often: {counts} optimizer steps."
    elif (rank := skipping_rank(evidence)) is not None:
        message = f"Rank {rank} skips its step {found.step} by what it alone has, such as its own loss."
    elif any(rate != rates[0] for rate in rates):
        message = f"The ranks step with different learning rates: {', '.join(str(rate[:1]) for rate in rates)}."
    elif found.kind == "scaled":
        message = "The ranks step with the same gradient at different scales: one of them changes it."
    else:
        return []
    return [fault(message, found.step, found.tensor, found.measured, place)]


def own_clip(evidence: Evidence) -> list[Finding]:
    """Finds gradients that each rank clips before they are averaged: the average has the same norm on all ranks."""
    clips = [[event for event in rank.of_kind("clip") if event["norm"] is not None] for rank in evidence.trained]
    for events in zip(*clips, strict=False):
        norms, first = [event["norm"] for event in events], events[0]
        active = any(norm > event["limit"] for norm, event in zip(norms, events, strict=True))
        if active and max(norms) - min(norms) > SAME * max(norms):
            shown = ", ".join(f"{norm:.3g} on rank {rank}" for rank, norm in enumerate(norms))
            message = f"Each rank clips its own gradient before the average: {first['function']} sees norms of {shown}."
            return [fault(message, first["step"], place=first["place"])]
    return []
