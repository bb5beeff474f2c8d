"""LD033: a collective returns wrong values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_doctor.evidence.communication import is_multiple
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import distance, passes_of
from ddp_doctor.evidence.rank_comparison import names_of
from ddp_doctor.evidence.requirements import optimizer_steps, wrapped
from ddp_doctor.findings import Finding, cannot_tell, fault
from ddp_doctor.records.run import RankRecord, Run

CODE = "LD033"
TITLE = "A collective returns wrong values"
CAUSE = (
    "The gradients that the optimizers get are not the mean of the ranks' gradients: on a rank they are zero, or "
    "changed between the reduction and the step. Faulty hardware, drivers and communication hooks do this "
    "without an error. So does an asynchronous collective whose result is used before it is complete."
)
WRONG = """\
dist.all_reduce(parameter.grad, async_op=True)
optimizer.step()    # with the gradient before or after the reduction, or a part of both
"""
FIX = """\
Wait for an asynchronous collective before its result is used:
    work = dist.all_reduce(parameter.grad, async_op=True)
    work.wait()
Otherwise compare the result of an all-reduce with a known one before the training, and check hooks and the network.
"""
THREADS = ("OpenNMT/OpenNMT-py#2295", "pytorch/pytorch#84803", "pytorch/pytorch#96600")
STRUCTURAL = True
EXPLAINS = "weights"
# Relative to the largest gradient of a step. In exact arithmetic, that of the bias of a key in attention is zero.
_ROUNDING = 1e-6
_LEAST_OF_16_BITS = 2.0**-24


def check(evidence: Evidence) -> list[Finding]:
    """Finds averaged gradients that are not a combination of those of the ranks, or that may not be averaged yet."""
    if events := [event for rank in evidence.trained for event in rank.of_kind("not_waited")]:
        first = events[0]
        message = (
            f"{first['op']} is called with async_op=True, and the optimizer steps without waiting for it: it may use "
            "the gradients before they are reduced."
        )
        return [fault(message, first["step"], amount=f"{len(events)} calls", place=first["of"])]
    run = evidence.worked("ranks")
    if run is None or not run.ranks[0].of_kind("ddp"):
        return []
    names = names_of(run.ranks[0])
    for step, event in enumerate(run.ranks[0].of_kind("step")):
        if not _is_averaged_once(run.ranks[0], step):
            continue
        least = _least(run, step, event["names"])
        for place, rank in enumerate(run.ranks):
            keys = [key for key in event["names"] if _is_wrong(run, evidence.single, place, f"{step}/{key}", least)]
            if not keys:
                continue
            applied = [rank.tensors[f"applied/{step}/{key}"] for key in keys]
            means = [torch.stack(run.tensors(f"local/{step}/{key}")).double().mean(0) for key in keys]
            amount = max(distance(a.double(), mean) for a, mean in zip(applied, means, strict=True))
            zero = not any(bool(tensor.any()) for tensor in applied)
            what = "zero" if zero else "not a combination of those that the ranks computed"
            message = (
                f"The gradient that rank {rank.rank} steps with is {what} for {len(keys)} parameters, although "
                "DistributedDataParallel has averaged it: a collective or a communication hook returned wrong values."
            )
            return [fault(message, step, names[keys[0]], f"{amount:.1e} of the gradient", event["place"])]
    return []


def _is_averaged_once(rank: RankRecord, step: int) -> bool:
    passes = passes_of(rank, step)
    return len(passes) == 1 and bool(passes[0]["synchronizes"])


def _least(run: Run, step: int, keys: Sequence[str]) -> float:
    """Returns the size below which a gradient is only rounding, or is lost by a hook that compresses."""
    sizes = [float(local.abs().max()) for key in keys for local in run.tensors(f"local/{step}/{key}") if local.numel()]
    least = _ROUNDING * max(sizes, default=0.0)
    return max(least, _LEAST_OF_16_BITS) if run.ranks[0].of_kind("comm_hook") else least


def _is_wrong(run: Run, single: RankRecord | None, place: int, key: str, least: float) -> bool:
    applied, local = run.tensors(f"applied/{key}"), run.tensors(f"local/{key}")
    if not applied or not local:
        return False
    own, mean = applied[place], torch.stack(local).double().mean(0)
    if float(mean.abs().max()) <= least or any(is_multiple(own, tensor) for tensor in [mean, *local]):
        return False
    # The code may change gradients on all ranks alike, and also on one process.
    equal = all(torch.equal(own, tensor) for tensor in applied)
    alone = single.tensors.get(f"applied/{key}") if single and not own.any() else None
    return not equal or (alone is not None and bool(alone.any()))


def _one_pass(evidence: Evidence) -> Finding | None:
    """A step has exactly one averaged pass through DistributedDataParallel."""
    ranks = evidence.ranks[:1]
    if any(_is_averaged_once(rank, step) for rank in ranks for step in range(len(rank.of_kind("step")))):
        return None
    return cannot_tell("Each step accumulates the gradients of several passes, so the average of one was not seen.")


NEEDS = (wrapped, optimizer_steps, _one_pass)
