"""The report as one self-contained HTML page, without scripts and without network access."""

from __future__ import annotations

from math import isfinite, log10

from jinja2 import Environment, PackageLoader

from ddp_doctor.faults import load_checks
from ddp_doctor.findings import Comparison, Report, Verdict
from ddp_doctor.output.terminal import STATES, by_reason, counts, headline, observed, outputs, plain, remarks, safe

_TITLES = {
    Verdict.FAULT: "Faults",
    Verdict.DEPENDS: "Depends on the number of devices",
    Verdict.UNCLEAR: "Unclear",
    Verdict.NOTE: "Notes",
}
# Exponents of the bars: below is rounding of 64 bits, above nothing is right.
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
    lists = {"Accepted": [(one.finding.code, f"{one.finding.place} {one.reason}") for one in report.accepted]}
    for state in STATES:
        rows = by_reason(report, state).items()
        lists[f"Checks: {state}"] = [(", ".join(codes), reason) for reason, codes in rows]
    stages = [(stage.name, f"{stage.outcome} ({stage.seconds:.1f} s)") for stage in report.stages]
    lists |= {"The examination": stages, "Versions": [*report.versions.items()]}
    return environment.get_template("report.html.jinja").render(
        report=report,
        headline=headline(report),
        counts=counts(report),
        outputs=outputs(report).values(),
        groups={title: report.of(kind) for kind, title in _TITLES.items()},
        checks=load_checks(),
        observed=observed,
        bars=bars_of(report.comparison or Comparison()),
        lists=lists,
        plain=plain,
        remarks=remarks(report),
    )


def bars_of(comparison: Comparison) -> list[tuple[str, int, bool]]:
    """Returns the difference of each step, its place on a logarithmic axis in percent, and if it is no rounding."""
    bars = []
    for value in comparison.differences:
        power = _MOST if not isfinite(value) else log10(value) if value > 0 else _LEAST
        share = (min(max(power, _LEAST), _MOST) - _LEAST) / (_MOST - _LEAST)
        bars.append((f"{value:.1e}", round(100 * share), not value <= comparison.threshold))
    return bars
