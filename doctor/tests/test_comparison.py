"""The comparison of the ranks with one process: gradients before clipping, weights, passes, and the first module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorded import SPEC, event, step

from ddp_doctor.evidence.rank_comparison import (
    THRESHOLD,
    RankComparison,
    compare_ranks,
    compare_records,
)
from ddp_doctor.records.run import RankRecord, Run

ONE_NAME = step(names={"0:0": "weight"})
GRADIENT = torch.tensor([3.0, 4.0])


def compared(ranks: list[RankRecord], one: RankRecord) -> RankComparison:
    return compare_records(Run(SPEC, Path(), ranks), one, threshold=THRESHOLD)


def clipped(rank: int, before: torch.Tensor, stale: float) -> RankRecord:
    """Returns a step with a gradient that is clipped to norm 1, beside a parameter that is not stepped."""
    tensors = {"applied/0/0:0": GRADIENT / 5, "unclipped/0/0:0": before, "local/0/0:0": before}
    return RankRecord(rank, [ONE_NAME], tensors | {"unclipped/0/1:0": torch.tensor([stale])})


@pytest.mark.parametrize(
    ("factors", "hidden"),
    [((1, 1), False), ((0.5, 0.5), True), ((1, 0.5), False)],
    ids=["right", "wrong", "not shared"],
)
def test_a_wrong_scale_is_seen_before_clipping(factors: tuple[float, float], hidden: bool) -> None:
    run = Run(SPEC, Path(), [clipped(rank, factor * GRADIENT, float(rank)) for rank, factor in enumerate(factors)])
    one = clipped(0, GRADIENT, 7.0)
    found = compare_records(run, one, threshold=THRESHOLD)
    assert not found.differs
    assert compare_ranks(run, Run(SPEC, Path(), [one])).differs == hidden


def called(number: int, rows: int, *names: str) -> RankRecord:
    """Returns a record with the outputs of modules, the first of which are equal on all processes."""
    tensors = {f"out/{place}": torch.ones(rows, 2) * (1 + place * number) for place in range(len(names))}
    tensors |= {f"{kind}/0/0:0": torch.tensor([1.0, number]) for kind in ("applied", "local")}
    outputs = [event("output", number=place, name=name, module="Linear") for place, name in enumerate(names)]
    return RankRecord(0, [ONE_NAME, *outputs], tensors)


@pytest.mark.parametrize(
    ("alone", "module", "seen"), [(("first", "second"), "second", True), (("second",), "second", False)]
)
def test_the_first_module_that_differs_is_known(alone: tuple[str, ...], module: str, seen: bool) -> None:
    found = compared([called(number, 2, "first", "second") for number in (0, 1)], called(4, 4, *alone))
    assert (found.module, found.modules_seen) == (module, seen)


def test_a_large_network_is_compared_in_the_steps_that_all_recorded() -> None:
    gradients = {f"{kind}/{step}/0:0": torch.ones(3) for kind in ("applied", "local") for step in range(2)}
    first = {name: tensor for name, tensor in gradients.items() if "/0/" in name}
    found = compared(
        [RankRecord(rank, [ONE_NAME] * 2, first) for rank in (0, 1)], RankRecord(0, [ONE_NAME] * 2, gradients)
    )
    assert (found.cannot, found.differences) == ("", (0.0,))
