"""The report as one self-contained HTML page, without scripts and without network access."""

from collections.abc import Iterator
from html import escape
from math import isfinite, log10
from pathlib import Path

from ddp_doctor.faults import load_checks
from ddp_doctor.findings import Comparison, Report, Verdict
from ddp_doctor.output.terminal import (
    STATES,
    by_reason,
    counts,
    headline,
    observed,
    outputs,
    plain,
    remarks,
    safe,
    title_of,
)

_STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
# The policy keeps the promise in the browser too: no script runs and nothing is loaded.
_HEAD = f"""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>ddp-doctor</title><link rel="icon" href="data:,"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<style>{_STYLE}</style></head><body><main>"""


def page_of(report: Report) -> str:
    """Returns the page."""
    return "\n".join([_HEAD, *_body(report), "</main></body></html>"])


def _body(report: Report) -> Iterator[str]:
    yield _tag("p", plain(report.target), "muted")
    yield _tag("h1", headline(report), "bad" if report.exit_code else "")
    yield _tag("p", counts(report))
    yield _tag("p", f"{report.devices} ranks · {report.seconds:.1f} s", "muted")
    yield from (_tag("pre", text) for text in outputs(report).values())
    for verdict in Verdict:
        found = report.of(verdict)
        yield from [_tag("h2", verdict.value.capitalize())] if found else []
        for finding in found:
            check = load_checks()[finding.code]
            yield _tag("h3", title_of(finding.code), "bad" if verdict is Verdict.FAULT else "")
            yield from (_tag("p", line) for line in observed(finding))
            yield _tag("p", check.CAUSE, "muted")
            yield _tag("pre", check.FIX.strip())
            yield _tag("p", f"Reported in {', '.join(check.THREADS)}", "muted")
    if (comparison := report.comparison) and comparison.differences:
        yield _tag("h2", "Compared with one process")
        yield from bars_of(comparison)
        yield _tag("p", plain(f"The largest difference of a gradient at each step ({comparison.method})."), "muted")
        if comparison.module:
            yield _tag("p", plain(f"The first module whose outputs differ is {comparison.module}."), "muted")
    lists = {"Accepted": [f"{one.finding.code} {one.finding.place}: {one.reason}" for one in report.accepted]}
    for state in STATES:
        rows = by_reason(report, state).items()
        lists[f"Checks: {state}"] = [f"{', '.join(codes)}{reason and ': '}{reason}" for reason, codes in rows]
    lists["Stages"] = [f"{stage.name}: {stage.outcome} ({stage.seconds:.1f} s)" for stage in report.stages]
    lists["Versions"] = [f"{name} {version}" for name, version in report.versions.items()]
    for title, lines in lists.items():
        yield from [_tag("h2", title)] if lines else []
        yield from (_tag("p", plain(line), "row") for line in lines)
    yield from (_tag("p", text, "muted") for text in remarks(report))


def bars_of(comparison: Comparison) -> Iterator[str]:
    """Yields a bar for the difference of each step, on a logarithmic axis."""
    for step, value in enumerate(comparison.differences):
        # From 1e-17, which is rounding of 64 bits, to 10.
        share = min(max(log10(value or 1e-17) + 17, 0) / 18, 1) if isfinite(value) else 1
        kind = "" if value <= comparison.threshold else "bad"
        yield f'<p class="{kind}">step {step}: {value:.1e}<span class="bar" style="width:{share:.0%}"></span></p>'


def _tag(name: str, text: str, kind: str = "") -> str:
    """Returns an element with a text, which may be of the examined code."""
    return f'<{name} class="{kind}">{escape(safe(text))}</{name}>'
