"""The reference of one process that got the micro-batches of the ranks one after another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import isclose
from typing import TYPE_CHECKING

from ddp_doctor.evidence.rank_comparison import (
    MICRO_BATCHES,
    RankComparison,
    before_clipping,
    compare_records,
    is_multiple,
    names_of,
    vector,
)
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord, Run

if TYPE_CHECKING:
    from ddp_doctor.probes.micro_batches import Turn

_UNSEEN = (
    "what depends on the samples of several ranks at once, such as batch norm or unequal numbers of labels, is not seen"
)


def compare_micro_batches(ranks: Run, reference: Run, *, threshold: float) -> RankComparison:
    """Compares a run of several ranks with one process that was given their micro-batches in turn.

    Args:
        ranks: The run of several ranks.
        reference: The run of one process.
        threshold: A larger difference is no rounding.
    """
    from ddp_doctor.probes.micro_batches import plan_of

    if not reference.worked:
        return RankComparison(cannot=f"one process with the inputs of the ranks fails ({reference.short_reason})")
    one = reference.ranks[0]
    plan = plan_of([rank.events for rank in ranks.ranks])
    if why := _why_other_losses(ranks, one, plan, threshold):
        return RankComparison(cannot=why)
    joined = _joined(one, plan, len(ranks.ranks), threshold)
    if isinstance(joined, str):
        return RankComparison(cannot=joined)
    # Which outputs belong to which micro-batch is not known.
    own = [replace(before_clipping(rank), events=rank.of_kind("step")) for rank in ranks.ranks]
    joined = replace(joined, events=own[0].events)
    found = compare_records(replace(ranks, ranks=own), joined, threshold=threshold, method=MICRO_BATCHES)
    return replace(found, limits=_UNSEEN)


def _why_other_losses(ranks: Run, one: RankRecord, plan: Sequence[Turn], threshold: float) -> str:
    """Returns why the losses are not those of the ranks up to one factor, or nothing.

    A wrong scale of the loss is one factor for all micro-batches. Anything else shows that one process did not get what
    the ranks had.
    """
    if one.of_kind("number"):
        return "the loss depends on a number that the ranks count together"
    passes = [[event["loss"] for event in record.of_kind("backward")] for record in [*ranks.ranks, one]]
    pairs = [(loss, passes[turn.rank][turn.number]) for turn, loss in zip(plan, passes[-1], strict=False)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return "the losses of the ranks are not known"
    factor = sum(b * b for _, b in known) and sum(a * b for a, b in known) / sum(b * b for _, b in known)
    if not factor or not all(isclose(a, factor * b, rel_tol=10 * threshold, abs_tol=1e-12) for a, b in known):
        return "with the recorded inputs of the model, the losses of one process are not those of the ranks"
    return ""


def _joined(one: RankRecord, plan: Sequence[Turn], ranks: int, threshold: float) -> RankRecord | str:
    """Returns a record with the gradients of one process by the steps of the ranks, or why there is none.

    One process steps after the micro-batches of all ranks in a step, or after those of each rank.
    """
    whole, of_rank = defaultdict[int, set[Turn]](set), defaultdict[tuple[int, int], set[Turn]](set)
    for turn in plan:
        whole[turn.step].add(turn)
        of_rank[turn.step, turn.rank].add(turn)
    own, parts = before_clipping(one), defaultdict[int, list[int]](list)
    for number, event in enumerate(one.of_kind("step")):
        had = {plan[place] for place in event["passes"] if place < len(plan)}
        if not had:
            continue
        step, rank, _ = min(had)
        if had not in (whole[step], of_rank[step, rank]):
            return "one process makes another number of backward passes per optimizer step"
        if had != whole[step] and not _is_linear(own, number, threshold):
            return "the program changes its gradients between the backward pass and the step"
        parts[step] += [number] * (ranks if had == whole[step] else 1)
    tensors: dict[str, torch.Tensor] = {}
    for step, numbers in parts.items():
        for kind, key in product(("applied", "local"), names_of(one)):
            found = [own.tensors[name] for number in numbers if (name := f"{kind}/{number}/{key}") in own.tensors]
            if len(found) == ranks:
                tensors[f"{kind}/{step}/{key}"] = torch.stack(found).mean(0)
    return replace(one, tensors=tensors)


def _is_linear(one: RankRecord, step: int, threshold: float) -> bool:
    """Returns whether the gradient that is applied is a multiple of that of the backward passes."""
    applied, local = vector(one, step, "applied"), vector(one, step, "local")
    if applied is None or local is None or not applied.any():
        return True
    return applied.shape == local.shape and is_multiple(applied, local, 10 * threshold)
