"""LD033: a collective returns wrong values."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import passes_of
from ddp_doctor.evidence.rank_comparison import is_multiple, names_of
from ddp_doctor.evidence.requirements import optimizer_steps, unmet, wrapped
from ddp_doctor.findings import Finding, cannot_tell, fault
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord, Run

TITLE = "A collective returns wrong values"
CAUSE = """\
The gradients that the optimizers get are not the mean of the ranks' gradients: an asynchronous collective is used
before it is complete, or hardware, a driver or a communication hook changes them. None of them gives an error.
"""
WRONG = """\
dist.all_reduce(parameter.grad, async_op=True)
optimizer.step()    # with the gradient before or after the reduction, or a part of both
"""
FIX = """\
Wait for an asynchronous collective before its result is used; otherwise check hooks, hardware and the network:
    work = dist.all_reduce(parameter.grad, async_op=True)
    work.wait()
"""
THREADS = ("OpenNMT/OpenNMT-py#2295", "pytorch/pytorch#84803", "pytorch/pytorch#96600")
EXPLAINS = "weights"
# Relative to the largest gradient of a step. In exact arithmetic, that of the bias of a key in attention is zero.
_ROUNDING = 1e-6
_LEAST_OF_16_BITS = 2.0**-24


def check(evidence: Evidence) -> list[Finding]:
    """Finds averaged gradients that are not a combination of those of the ranks, or that may not be averaged yet."""
    for event in (event for rank in evidence.trained for event in rank.of_kind("not_waited")):
        message = f"{event['op']} is called with async_op=True, and the optimizer steps without waiting for it."
        return [fault(message, event["step"], place=event["of"])]
    if missing := unmet(evidence, wrapped, optimizer_steps):
        return missing
    run = evidence.runs["ranks"]
    first, names = run.ranks[0], names_of(run.ranks[0])
    steps = [(step, event) for step, event in enumerate(first.of_kind("step")) if _is_averaged_once(first, step)]
    if not steps:
        return [cannot_tell("Each step accumulates gradients of several passes, so the average of one was not seen.")]
    for step, event in steps:
        least = _least(run, step, event["names"])
        for number in range(len(run.ranks)):
            keys = [key for key in event["names"] if _is_wrong(run, evidence.single, number, f"{step}/{key}", least)]
            if not keys:
                continue
            message = f"{len(keys)} gradients with which rank {number} steps are no combination of those of the ranks."
            return [fault(message, step, names[keys[0]], place=event["place"])]
    return []


def _is_averaged_once(rank: RankRecord, step: int) -> bool:
    passes = passes_of(rank, step)
    return len(passes) == 1 and bool(passes[0]["synchronizes"])


def _least(run: Run, step: int, keys: Sequence[str]) -> float:
    """Returns the size below which a gradient is only rounding, or is lost by a hook that compresses."""
    sizes = [float(local.abs().max()) for key in keys for local in run.tensors(f"local/{step}/{key}") if local.numel()]
    least = _ROUNDING * max(sizes, default=0.0)
    return max(least, _LEAST_OF_16_BITS) if run.ranks[0].of_kind("comm_hook") else least


def _is_wrong(run: Run, single: RankRecord | None, number: int, key: str, least: float) -> bool:
    applied, local = run.tensors(f"applied/{key}"), run.tensors(f"local/{key}")
    if not applied or not local:
        return False
    own, mean = applied[number], torch.stack(local).double().mean(0)
    if float(mean.abs().max()) <= least or any(is_multiple(own, tensor) for tensor in [mean, *local]):
        return False
    # The code may change gradients on all ranks alike, and also on one process.
    equal = all(torch.equal(own, tensor) for tensor in applied)
    alone = single.tensors.get(f"applied/{key}") if single and not own.any() else None
    return not equal or (alone is not None and bool(alone.any()))
