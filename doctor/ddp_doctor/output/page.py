"""The report as one self-contained HTML page, without scripts and without network access."""

from __future__ import annotations

from math import isfinite, log10
from typing import Any

from jinja2 import Environment, PackageLoader

from ddp_doctor.faults import load_checks
from ddp_doctor.findings import Comparison, Report, Verdict
from ddp_doctor.output.terminal import (
    STATES,
    by_reason,
    counts,
    facts,
    headline,
    outputs,
    plain,
    remarks,
    safe,
    verdict,
)

_TITLES = {
    Verdict.FAULT: "Faults",
    Verdict.DEPENDS: "Depends on the number of devices",
    Verdict.UNCLEAR: "Unclear",
    Verdict.NOTE: "Notes",
}
# The drawing is as wide as a telephone, so that its text is legible there: its left, right, upper and lower end.
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 330, 12, 150
# Exponents of its axis: below is rounding of 64 bits, above nothing is right.
_LEAST, _MOST = -17, 1


def page_of(report: Report) -> str:
    """Returns the page."""
    environment = Environment(
        loader=PackageLoader("ddp_doctor.output"),
        autoescape=True,
        finalize=lambda value: safe(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = {title: report.of(kind) for kind, title in _TITLES.items()}
    states = {state.capitalize(): by_reason(report, state) for state in STATES}
    return environment.get_template("report.html.jinja").render(
        report=report,
        curve=curve_of(report.comparison),
        verdict=verdict(report).partition(" "),
        headline=headline(report),
        counts=counts(report),
        groups={title: found for title, found in groups.items() if found},
        states={title: rows for title, rows in states.items() if rows},
        outputs=outputs(report).values(),
        checks=load_checks(),
        facts=facts,
        plain=plain,
        remarks=remarks(report),
    )


def curve_of(comparison: Comparison | None) -> dict[str, Any] | None:
    """Returns the drawing of the difference of each step, on a logarithmic axis; None without any."""
    if comparison is None or not comparison.differences:
        return None
    gap = (_RIGHT - _LEFT) / len(comparison.differences)
    points = [
        {
            "x": round(_LEFT + gap * (step + 0.5), 1),
            "y": _height(value),
            "text": f"{value:.1e}" if isfinite(value) else "not finite",
            "above": not value <= comparison.threshold,
        }
        for step, value in enumerate(comparison.differences)
    ]
    return {
        # The values, for readers who do not see it.
        "title": ", ".join(f"step {step}: {point['text']}" for step, point in enumerate(points)),
        "points": points,
        "ticks": {f"1e{power}": _height(10.0**power) for power in range(_LEAST + 1, _MOST + 1, 4)},
        "threshold": _height(comparison.threshold),
    }


def _height(value: float) -> float:
    power = _MOST if not isfinite(value) else log10(value) if value > 0 else _LEAST
    share = (min(max(power, _LEAST), _MOST) - _LEAST) / (_MOST - _LEAST)
    return round(_BOTTOM - share * (_BOTTOM - _TOP), 1)
