"""The reference of one process that got the micro-batches of the ranks one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from typing import TYPE_CHECKING

from ddp_doctor.evidence.rank_comparison import (
    MICRO_BATCHES,
    RankComparison,
    before_clipping,
    compare_records,
    is_multiple,
    vector,
)
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord, Run

if TYPE_CHECKING:
    from ddp_doctor.probes.micro_batches import Turn

_KINDS = ("applied", "local")
_DIVISIONS = ("div", "divide", "true_divide", "__truediv__", "div_")
# How far counts of other batches may be from those of the ranks, all steps together.
_ON_AVERAGE = 0.15
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
    if not plan or not one.of_kind("step"):
        return RankComparison(cannot="no optimizer step was seen on one process")
    if why := _why_other_losses(ranks, one, plan, threshold):
        return RankComparison(cannot=why)
    factor = _common_factor(one, plan, len(ranks.ranks))
    if not factor:
        return RankComparison(cannot="the loss depends on a number that the ranks count together")
    joined = _joined(ranks, one, plan, threshold, factor)
    if isinstance(joined, str):
        return RankComparison(cannot=joined)
    if not joined.tensors:
        return RankComparison(cannot="one process ends before it has had all micro-batches of a step of the ranks")
    unclipped = replace(ranks, ranks=[_without_outputs(before_clipping(rank)) for rank in ranks.ranks])
    found = compare_records(unclipped, joined, threshold=threshold, method=MICRO_BATCHES)
    return replace(found, limits=_UNSEEN)


def _without_outputs(record: RankRecord) -> RankRecord:
    return replace(record, tensors={name: value for name, value in record.tensors.items() if name[:4] != "out/"})


def _why_other_losses(ranks: Run, one: RankRecord, plan: Sequence[Turn], threshold: float) -> str:
    """Returns why the losses are not those of the ranks up to one factor, or nothing.

    A wrong scale of the loss is one factor for all micro-batches. Anything else shows that one process did not get what
    the ranks had. The weights of a large model are recorded in the first step alone, and later ones are not known.
    """
    passes = [[event["loss"] for event in record.of_kind("backward")] for record in [*ranks.ranks, one]]
    after = [int(name.split("/")[1]) for name in ranks.ranks[0].tensors if name.startswith("after/")]
    latest = max(after, default=len(plan)) + 1
    pairs = [
        (loss, passes[turn.rank][turn.number])
        for turn, loss in zip(plan, passes[-1], strict=False)
        if turn.step <= latest
    ]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return "the losses of the ranks are not known"
    factor = sum(b * b for _, b in known) and sum(a * b for a, b in known) / sum(b * b for _, b in known)
    if not factor or not all(isclose(a, factor * b, rel_tol=10 * threshold, abs_tol=1e-12) for a, b in known):
        return "with the recorded inputs of the model, the losses of one process are not those of the ranks"
    return ""


def _common_factor(one: RankRecord, plan: Sequence[Turn], ranks: int) -> float:
    """Returns what the loss of a rank is multiplied with if all divide by a number that they count together; else 1.

    One process divides the loss of each rank by the number of all of them, for example of tokens. The ranks have the
    mean of their gradients. The factor is that of a mean over all samples. It is 0 if it is not known. A program that
    loads its next batches before it counts those of this step has counted others, which are as many on average.
    """
    first = {(turn.step, turn.rank): turn.number for turn in reversed(plan)}
    found: dict[tuple[int, int], dict[int, tuple[float, float]]] = {}
    for event in one.of_kind("number"):
        if event["function"] not in _DIVISIONS:
            return 0.0
        step, rank, number = event["turn"]
        place = step, number - first[step, rank]
        known = found.setdefault(place, {}).setdefault(rank, (event["own"], event["given"]))
        if known != (event["own"], event["given"]):
            return 0.0
    if not found:
        return 1.0
    sums = [
        [sum(values) for values in zip(*numbers.values(), strict=True)]
        for numbers in found.values()
        if len(numbers) == ranks and len({given for _, given in numbers.values()}) == 1
    ]
    factors = [given / own for own, given in sums if own]
    if factors and all(isclose(factor, factors[0], rel_tol=1e-6) for factor in factors):
        return factors[0]
    own, given = (sum(values) for values in zip(*sums, strict=True)) if sums else (0.0, 0.0)
    whole = round(given / own) if own else 0
    return float(whole) if own and isclose(given / own, whole, rel_tol=_ON_AVERAGE) else 0.0


def _joined(ranks: Run, one: RankRecord, plan: Sequence[Turn], threshold: float, factor: float) -> RankRecord | str:
    """Returns a record with the gradients of one process by the steps of the ranks, or why there is none."""
    wanted: dict[int, set[Turn]] = {}
    for turn in plan:
        wanted.setdefault(turn.step, set()).add(turn)
    parts: dict[int, list[int]] = {}
    own, taken = before_clipping(one), one.of_kind("step")
    for number, event in enumerate(taken):
        had = {plan[place] for place in event["passes"] if place < len(plan)}
        steps = {turn.step for turn in had}
        if not had:
            break
        of_ranks = [{turn for turn in wanted[min(steps)] if turn.rank == rank} for rank in range(len(ranks.ranks))]
        if len(steps) > 1 or had not in [wanted[min(steps)], *of_ranks]:
            return "one process makes another number of backward passes per optimizer step"
        if had in of_ranks and len(of_ranks) > 1 and not _is_linear(own, number, threshold):
            return "the program changes its gradients between the backward pass and the step"
        parts.setdefault(min(steps), []).append(number)
    tensors: dict[str, torch.Tensor] = {}
    for step, numbers in parts.items():
        whole = len(numbers) == 1 and {plan[place] for place in taken[numbers[0]]["passes"]} == wanted[step]
        if not whole and len(numbers) != len(ranks.ranks):
            continue
        for kind in _KINDS:
            keys = [name.split("/", 2)[2] for name in own.tensors if name.startswith(f"{kind}/{numbers[0]}/")]
            for key in keys:
                found = [own.tensors.get(f"{kind}/{number}/{key}") for number in numbers]
                if all(tensor is not None for tensor in found):
                    mean = torch.stack([tensor for tensor in found if tensor is not None]).mean(0)
                    tensors[f"{kind}/{step}/{key}"] = factor * mean
    return replace(one, events=ranks.ranks[0].of_kind("step"), tensors=tensors)


def _is_linear(one: RankRecord, step: int, threshold: float) -> bool:
    """Returns whether the gradient that is applied is a multiple of that of the backward passes."""
    applied, local = vector(one, step, "applied"), vector(one, step, "local")
    if applied is None or local is None or not applied.any():
        return True
    return applied.shape == local.shape and is_multiple(applied, local, 10 * threshold)
