"""LD011: one rank clips or steps differently."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence
from ddp_doctor.findings import Finding, fault

CODE = "LD011"
TITLE = "One rank clips or steps differently"
CAUSE = """\
DDP gives all ranks the same gradient, but does not compare their weights. If one rank clips, scales, skips or
steps differently, its weights differ from then on, and nothing equalizes them. Later gradients are averages
over different models. The saved checkpoint is that of rank 0, which nobody evaluated as a whole.
"""
FIX = """\
Take every decision about the step on all ranks, from a reduced value:
    norm = clip_grad_norm_(model.parameters(), 1.0)    # on each rank, after backward()
    if found_inf_on_any_rank: continue                 # all-reduce the flag first
"""
THREADS = ("deepspeedai/DeepSpeed#1801",)
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that one rank changes, and steps that one rank leaves out."""
    found = first_divergence(evidence)
    if found is None:
        return []
    clips = [[event for event in rank.of_kind("clip") if event["step"] == found.step] for rank in evidence.ranks]
    counts = [len(rank.of_kind("stepped")) for rank in evidence.ranks]
    rates = [[event["lr"] for event in rank.of_kind("step")][found.step : found.step + 1] for rank in evidence.ranks]
    place = found.place
    if len({len(clip) for clip in clips}) > 1:
        number = next(number for number, clip in enumerate(clips) if clip)
        other = min(range(len(clips)), key=lambda rank: len(clips[rank]))
        event = clips[number][0]
        message = f"Rank {number} clips the gradients with {event['function']}, but rank {other} does not."
        place = event["place"]
    elif found.kind == "steps":
        message = f"The ranks step unequally often: {_listed(counts)} optimizer steps."
    elif any(rate != rates[0] for rate in rates):
        message = (
            f"The ranks step with different learning rates: {_listed([rate[0] if rate else None for rate in rates])}."
        )
    elif found.kind == "scaled":
        message = "The ranks step with the same gradient at different scales: one of them changes it."
    else:
        return []
    amount = f"the gradients of two ranks differ by {found.amount:.1e}" if found.amount else ""
    tensor = found.parameters[0] if found.parameters else ""
    return [fault(message, step=found.step, tensor=tensor, amount=amount, place=place)]


def _listed(values: Sequence[object]) -> str:
    return ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))
