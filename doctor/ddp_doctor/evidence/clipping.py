"""Whether clipping hides a difference between several ranks and one process with the same samples."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from ddp_doctor.evidence.rank_comparison import RankComparison, compare_records
from ddp_doctor.records.run import RankRecord, Run


def compare_unclipped(found: RankComparison, ranks: Run, one: RankRecord, *, threshold: float) -> RankComparison:
    """Returns the comparison before clipping if only the clipped gradients are equal, otherwise the one given.

    While it is active, clipping to a norm makes gradients of different lengths equal.
    """
    if found.cannot or found.differs or not _is_shared(ranks):
        return found
    before = compare_records(
        replace(ranks, ranks=[_unclipped(rank) for rank in ranks.ranks]), _unclipped(one), threshold=threshold
    )
    return replace(before, clipped=True) if before.differs else found


def _is_shared(ranks: Run) -> bool:
    """Returns whether the ranks clip the gradients that they share, not those that each of them averages later."""
    names = _clipped(ranks.ranks[0])
    return bool(names) and all(
        len(found := ranks.tensors(name)) == len(ranks.ranks) and all(torch.equal(a, b) for a, b in pairwise(found))
        for name in names
    )


def _clipped(record: RankRecord) -> list[str]:
    """Returns the gradients before clipping of the parameters that are stepped; a step may leave others alone."""
    return [name for name in record.tensors if name.startswith("unclipped/") and _applied(name) in record.tensors]


def _unclipped(record: RankRecord) -> RankRecord:
    """Returns a record with the gradients before clipping as those that were applied."""
    before = {_applied(name): record.tensors[name] for name in _clipped(record)}
    return replace(record, tensors=record.tensors | before)


def _applied(name: str) -> str:
    return name.replace("unclipped/", "applied/", 1)
