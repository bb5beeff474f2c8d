"""Clipping hides no wrong scale, and gradients that are not shared yet are no difference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_doctor.evidence.rank_comparison import THRESHOLD, compare_records, compare_unclipped
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

GRADIENT = torch.tensor([3.0, 4.0])
STEP = {"kind": "step", "names": {"0:0": "weight"}, "lr": [0.1]}


def record(rank: int, before: torch.Tensor, stale: float = 0.0) -> RankRecord:
    """Returns a step with a gradient that is clipped to norm 1, beside a parameter that is not stepped."""
    tensors = {"applied/0/0:0": GRADIENT / 5, "unclipped/0/0:0": before, "local/0/0:0": before}
    return RankRecord(rank, [STEP], tensors | {"unclipped/0/1:0": torch.tensor([stale])})


@pytest.mark.parametrize(
    ("ranks", "hidden"),
    [
        ((GRADIENT, GRADIENT), False),
        ((GRADIENT / 2, GRADIENT / 2), True),
        # Clipped before they are averaged.
        ((GRADIENT, GRADIENT / 2), False),
    ],
)
def test_a_wrong_scale_is_seen_before_clipping(ranks: tuple[torch.Tensor, torch.Tensor], hidden: bool) -> None:
    run = Run(
        Spec(Target("mine:main"), world_size=2),
        Path(),
        [record(rank, before, stale=float(rank)) for rank, before in enumerate(ranks)],
    )
    one = record(0, GRADIENT, stale=7.0)
    found = compare_records(run, one, threshold=THRESHOLD)
    assert not found.differs
    found = compare_unclipped(found, run, one, threshold=THRESHOLD)
    assert found.differs == found.clipped == hidden
