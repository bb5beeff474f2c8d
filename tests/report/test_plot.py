"""Number formats and axes: ticks are round, and rounding never hides an error."""

from __future__ import annotations

import math

import pytest
from html_page import SPACE
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_mnist.report import formats
from lit_mnist.report.plot import linear_axis, log_axis, step_axis


def test_rounding_never_hides_an_error() -> None:
    for samples in (1000, 10_000, 10_001, 60_000, 116_323):
        assert formats.percent(1 - 1 / samples, samples) != formats.percent(1.0, samples)
        assert not formats.percent(1 - 1 / samples, samples).startswith("100")
    assert formats.percent(0.9908, 10_000) == f"99.08{SPACE}%"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (formats.duration(0.0123), "0.012 s"),
        (formats.duration(59.94), "59.9 s"),
        (formats.duration(59.96), "1 min 00 s"),
        (formats.duration(3599.7), "1 h 00 min"),
        (formats.duration(11_220), "3 h 07 min"),
        (formats.size(512), "512 B"),
        (formats.size(1024), "1.0 KiB"),
        (formats.size(1.5 * 1024**4), "1.5 TiB"),
        (formats.number(0), "0.000"),
        (formats.number(0.031249), "0.03125"),
        (formats.number(12345.6), "12,346"),
        (formats.number(0.0000123456), "1.235e-5"),
        (formats.number(-math.inf), "\u2212∞"),
        (formats.count(10_000), "10,000"),
        (formats.short(1e-5), "1e-5"),
    ],
)
def test_values_are_formatted_for_readers(written: str, expected: str) -> None:
    assert written.replace(SPACE, " ") == expected


finite = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(values=st.lists(finite, min_size=1, max_size=20), least=st.floats(1e-6, 1e3))
def test_a_linear_axis_covers_its_values_with_different_ticks(values: list[float], least: float) -> None:
    axis = linear_axis(values, least=least)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low - slack <= min(values) <= max(values) <= axis.high + slack
    assert 2 <= len(axis.ticks) <= 12
    assert list(axis.ticks) == sorted(set(axis.ticks))
    assert (axis.share(axis.low), axis.share(axis.high)) == (0, 1)
    if axis.high - axis.low > 1e-4:
        assert len(set(axis.tick_labels())) == len(axis.ticks)


@settings(deadline=None)
@given(low=st.floats(1e-12, 1e6), factor=st.floats(10, 1e30))
def test_a_log_axis_covers_its_values_evenly(low: float, factor: float) -> None:
    axis = log_axis([low, low * factor])
    assert axis.low <= low < low * factor <= axis.high
    assert 2 <= len(axis.ticks) <= 10
    assert axis.share(math.sqrt(axis.low * axis.high)) == pytest.approx(0.5)
    assert len(set(axis.tick_labels())) == len(axis.ticks)


def test_ticks_are_round() -> None:
    assert step_axis(100).ticks == (0, 20, 40, 60, 80, 100)
    assert linear_axis([0.0, 0.3], least=0.1).ticks == (0.0, 0.1, 0.2, 0.3)
    assert log_axis([0.03, 0.6]).ticks == (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    assert log_axis([0.003, 60]).ticks == (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


@settings(deadline=None)
@given(last=st.integers(0, 10**9))
def test_the_step_axis_ends_at_the_last_step(last: int) -> None:
    axis = step_axis(last)
    assert (axis.low, axis.high) == (0, max(last, 1))
    assert axis.ticks[0] == 0
    assert 2 <= len(axis.ticks) <= 6
    assert axis.ticks[-1] <= axis.high
    assert all(tick == int(tick) for tick in axis.ticks)
