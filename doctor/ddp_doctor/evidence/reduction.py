"""Averaged gradients that are not a combination of those that the ranks computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddp_doctor.evidence.communication import is_multiple
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import distance, passes_of, wraps
from ddp_doctor.evidence.rank_comparison import names_of
from ddp_doctor.records.run import RankRecord, Run

# Relative to the largest gradient of a step. In exact arithmetic, that of the bias of a key in attention is zero.
_ROUNDING = 1e-6
_LEAST_OF_16_BITS = 2.0**-24


@dataclass(frozen=True)
class WrongReduction:
    """An averaged gradient that is none of those of the ranks.

    Attributes:
        step: The step, from 0.
        rank: The rank that got it.
        zero: Whether it is zero.
        parameters: Names of the parameters.
        amount: Largest relative difference from the mean of the ranks' gradients.
        place: The user's place of the optimizer step.
    """

    step: int
    rank: int
    zero: bool
    parameters: tuple[str, ...]
    amount: float
    place: str


def wrong_reduction(evidence: Evidence) -> WrongReduction | None:
    """Returns the first gradient that a rank got from the others, and that is not a combination of theirs."""
    run = evidence.worked("ranks")
    if run is None or not wraps(run):
        return None
    names = names_of(run.ranks[0])
    for step, event in enumerate(run.ranks[0].of_kind("step")):
        passes = passes_of(run.ranks[0], step)
        if len(passes) != 1 or not passes[0]["synchronizes"]:
            continue
        known = [f"{step}/{key}" for key in event["names"]]
        least = _least(run, known)
        for place, rank in enumerate(run.ranks):
            wrong = [key for key in known if _is_wrong(run, evidence.single, place, key, least)]
            keys = [key.partition("/")[2] for key in wrong]
            if keys:
                applied = [rank.tensors[f"applied/{step}/{key}"] for key in keys]
                means = [torch.stack(run.tensors(f"local/{step}/{key}")).double().mean(0) for key in keys]
                amount = max(distance(a.double(), mean) for a, mean in zip(applied, means, strict=True))
                zero = not any(bool(tensor.any()) for tensor in applied)
                return WrongReduction(step, rank.rank, zero, tuple(names[key] for key in keys), amount, event["place"])
    return None


def _least(run: Run, keys: Sequence[str]) -> float:
    """Returns the size below which a gradient is only rounding, or is lost by a hook that compresses."""
    sizes = [float(local.abs().max()) for key in keys for local in run.tensors(f"local/{key}") if local.numel()]
    least = _ROUNDING * max(sizes, default=0.0)
    return max(least, _LEAST_OF_16_BITS) if run.ranks[0].of_kind("comm_hook") else least


def _is_wrong(run: Run, single: RankRecord | None, place: int, key: str, least: float) -> bool:
    applied, local = run.tensors(f"applied/{key}"), run.tensors(f"local/{key}")
    if not applied or not local:
        return False
    own, mean = applied[place], torch.stack(local).double().mean(0)
    if float(mean.abs().max()) <= least or any(is_multiple(own, tensor) for tensor in [mean, *local]):
        return False
    equal = all(torch.equal(own, tensor) for tensor in applied)
    if bool(own.any()):
        # The code may change gradients on all ranks alike.
        return not equal
    alone = single.tensors.get(f"applied/{key}") if single else None
    return not equal or (alone is not None and bool(alone.any()))
