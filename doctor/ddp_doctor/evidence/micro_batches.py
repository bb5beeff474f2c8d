"""The reference of one process that got the micro-batches of the ranks one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_doctor.evidence.rank_comparison import (
    MICRO_BATCHES,
    RankComparison,
    before_clipping,
    compare_records,
    names_of,
    solve,
    vector,
)
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord, Run

_UNSEEN = (
    "what depends on the samples of several ranks at once, such as batch norm or unequal numbers of labels, is not seen"
)


def compare_micro_batches(ranks: Run, reference: Run, *, threshold: float) -> RankComparison:
    """Compares the first step of several ranks with one process that was given their micro-batches in turn.

    The gradient of one process is the mean of those of the ranks, times what its losses and its step differ by.
    """
    if not reference.worked:
        return RankComparison(cannot=f"one process with the inputs of the ranks fails ({reference.short_reason})")
    one = before_clipping(reference.ranks[0])
    factor = _factor(ranks.ranks, one, 10 * threshold)
    if isinstance(factor, str):
        return RankComparison(cannot=factor)
    local = {key: ranks.tensors(f"local/0/{key}") for key in names_of(ranks.ranks[0])}
    means = {key: factor * torch.stack(found).mean(0) for key, found in local.items() if found}
    tensors = {f"{kind}/0/{key}": mean for kind in ("applied", "local") for key, mean in means.items()}
    # Which outputs belong to which micro-batch is not known.
    own = [replace(before_clipping(rank), events=rank.of_kind("step")) for rank in ranks.ranks]
    joined = replace(one, events=own[0].events, tensors=tensors)
    found = compare_records(replace(ranks, ranks=own), joined, threshold=threshold, method=MICRO_BATCHES)
    return replace(found, limits=_UNSEEN)


def _factor(ranks: Sequence[RankRecord], one: RankRecord, tolerance: float) -> float | str:
    """Returns the gradient of one process as a multiple of the mean of those of the ranks, or why it is not known.

    A wrong scale of the loss is one factor for all micro-batches. Anything else shows that one process did not get what
    the ranks had.
    """
    if one.of_kind("number"):
        return "the loss depends on a number that the ranks count together"
    theirs = [event["loss"] for rank in ranks for event in rank.of_kind("backward") if not event["step"]]
    pairs = zip(theirs, [event["loss"] for event in one.of_kind("backward")], strict=False)
    known = torch.tensor([pair for pair in pairs if None not in pair], dtype=torch.float64).view(-1, 2)
    loss, left = solve([known[:, 0]], known[:, 1])
    if not loss or left > tolerance:
        return "with the recorded inputs of the model, the losses of one process are not those of the ranks"
    step, left = solve([vector(one, 0, "local")], vector(one, 0, "applied"))
    if not step or left > tolerance:
        return "the program changes its gradients between the backward pass and the step"
    of_one, of_rank = (sum(len(event["passes"]) for event in record.of_kind("step")[:1]) for record in (one, ranks[0]))
    if of_one not in (of_rank, len(theirs)):
        return "one process makes another number of backward passes per optimizer step"
    return loss[0] * step[0] * (len(ranks) if of_one == len(theirs) else 1)
