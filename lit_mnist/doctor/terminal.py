"""The report as text for the terminal. Imports no torch."""

from __future__ import annotations

import shutil
import textwrap

from lit_mnist.doctor.checks import describe
from lit_mnist.doctor.findings import Finding, Report, Verdict

MARKS = {
    Verdict.FAULT: "✗",
    Verdict.DEPENDS: "≈",
    Verdict.UNCLEAR: "?",
    Verdict.NOTE: "·",
    Verdict.CANNOT_TELL: "-",
    Verdict.NOT_REACHED: "-",
}
LIMITS = (
    "Not examined: faults of hardware, NCCL and streams, sharded and pipelined models, nondeterministic cuDNN, and "
    "what begins after these steps."
)
_SHORT = (Verdict.CANNOT_TELL, Verdict.NOT_REACHED)


def report_text(report: Report) -> str:
    """Returns the report, the most serious findings first."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 118)
    titles = {code: check.title for code, check in describe().items()}
    lines = ["", headline(report), ""]
    for finding in report.findings:
        if finding.verdict not in _SHORT:
            lines += [*_finding(finding, titles.get(finding.code, ""), width), ""]
    for verdict in _SHORT:
        lines += _grouped(report, verdict, width)
    for title, text in (("The ranks", report.hang), ("The error", report.error)):
        if text:
            lines += [f"{title}:", textwrap.indent(text.rstrip()[-6000:], "  "), ""]
    lines += [f"{stage.seconds:6.1f} s  {stage.name}: {stage.outcome}" for stage in report.stages]
    lines += [f"{report.seconds:6.1f} s  in all", "", *textwrap.wrap(LIMITS, width)]
    return "\n".join(lines)


def headline(report: Report) -> str:
    """Returns the result in one line."""
    what = f"{report.target} on {report.devices} ranks"
    faults = len(report.faults)
    if faults:
        return f"{what}: {faults} {'fault' if faults == 1 else 'faults'}"
    if report.hang:
        return f"{what}: a rank failed, hung or was lost"
    if report.error:
        return f"{what}: fails on one process already"
    return f"{what}: no fault found by {len(report.checks)} checks"


def facts(finding: Finding) -> list[str]:
    """Returns where and how much, in short parts."""
    parts = [f"step {finding.step}"] if finding.step is not None else []
    return [*parts, *(part for part in (finding.tensor, finding.amount) if part)]


def _finding(finding: Finding, title: str, width: int) -> list[str]:
    lines = [f"{MARKS[finding.verdict]} {finding.code} {title} ({finding.verdict.value})"]
    for text in (finding.message, finding.proof):
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")
    if parts := facts(finding):
        lines += textwrap.wrap("; ".join(parts), width, initial_indent="  ", subsequent_indent="  ")
    if finding.place:
        lines.append(f"  at {finding.place}")
    return [*lines, f"  more: doctor --explain {finding.code}"]


def _grouped(report: Report, verdict: Verdict, width: int) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for finding in report.of(verdict):
        reasons.setdefault(finding.message, []).append(finding.code)
    if not reasons:
        return []
    texts = [f"{', '.join(codes)}: {message}" for message, codes in reasons.items()]
    return [*textwrap.wrap(f"{MARKS[verdict]} {verdict.value}: {' '.join(texts)}", width, subsequent_indent="  "), ""]
