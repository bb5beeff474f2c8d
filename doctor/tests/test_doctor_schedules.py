"""A learning rate is compared with that of one process after as many steps, and after as many samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ddp_doctor.faults.ld017_schedule_depends_on_ranks import _compare, _scaled_twice
from ddp_doctor.findings import Verdict
from ddp_doctor.records.run import RankRecord


def cosine(step: float, total: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(step / total, 1)))


def warm(step: int, total: int) -> float:
    """A warm-up of two steps, however many ranks there are."""
    return (step + 1) / 3 if step < 2 else cosine(step, total)


@pytest.mark.parametrize(
    ("ours", "alone", "said"),
    [
        (lambda step: cosine(step, 20), lambda step: cosine(step, 40), None),
        (lambda step: warm(step, 20), lambda step: warm(step, 40), None),
        (lambda step: cosine(2 * step, 20), lambda step: cosine(step, 40), Verdict.FAULT),
        # A warm-up from 0 that counts the steps of one process, and one that is half as long on two ranks.
        (lambda step: 2 * step / 100, lambda step: step / 100, None),
        (lambda step: 2 * step / 20, lambda step: step / 40, Verdict.FAULT),
        # A warm-up from the rate of one process to that of all.
        (lambda step: 1 + step / 3, lambda _: 1.0, Verdict.DEPENDS),
    ],
)
def test_only_the_rate_of_a_later_sample_is_a_fault(
    ours: Callable[[int], float], alone: Callable[[int], float], said: Verdict | None
) -> None:
    steps, found = _compare([ours(step) for step in range(3)], [alone(step) for step in range(14)], 2)
    assert steps == 2
    assert (found.verdict if found else None) is said


def test_a_short_epoch_compares_nothing() -> None:
    assert _compare([1.0, 0.5, 0.2], [1.0, 0.9, 0.8], 2) == (0, None)


@pytest.mark.parametrize(
    ("factor", "base", "steps", "said"),
    [(2, 0.0, 3, False), (4, 0.0, 3, True), (4, 0.0, 1, False), (4, 0.2, 1, False), (4, 0.4, 1, True)],
)
def test_a_rate_with_the_square_of_the_number_of_ranks_is_a_fault(
    factor: int, base: float, steps: int, said: bool
) -> None:
    """A schedule of torch may begin with a part of its base, and then the base is compared.

    A single rate may be the first one of a warm-up by hand, which is shorter on several ranks.
    """
    record, single = (
        RankRecord(0, steps * [{"kind": "step", "step": 0, "optimizer": 0, "lr": [rate], "base": [start], "place": ""}])
        for rate, start in ((0.1 * factor, base), (0.1, base and 0.1))
    )
    found = _scaled_twice(SimpleNamespace(single=single), record, 2)
    assert bool(found) is said
