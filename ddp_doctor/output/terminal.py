"""The report as text for the terminal. Imports no torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from ddp_doctor.checks import describe
from ddp_doctor.findings import Files, Finding, Report, Verdict

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
_PROTECTIONS = {"private view": "a private view of all files", "redirected writes": "redirecting what Python writes"}
SHORT = (Verdict.CANNOT_TELL, Verdict.NOT_REACHED)
# Control characters except the newline, and surrogates, which cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Characters that reorder or hide the text around them, and separators of lines.
_DECEPTIVE = re.compile("[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Prints a text; the reader of a pipe may have gone, which ends nothing."""
    stream = stream or sys.stdout
    try:
        print(_escaped(text), file=stream, flush=True)
    except OSError:
        # What is still in the buffer goes nowhere, too.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def report_text(report: Report, program: str = "ddp-doctor") -> str:
    """Returns the report, the most serious findings first. Text of the examined code cannot control the terminal.

    Args:
        report: The report.
        program: The command that explains a check, as it can be pasted.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, 118)
    lines = ["", f"{plain(report.target)} on {report.devices} ranks: {headline(report)}", ""]
    for finding in report.findings:
        if finding.verdict not in SHORT:
            lines += [*_finding(finding, width, program), ""]
    for verdict in SHORT:
        lines += _grouped(report, verdict, width)
    for title, text in (("The ranks", report.hang), ("The error", report.error)):
        if text:
            lines += [f"{title}:", textwrap.indent(safe(text.rstrip()[-6000:]), "  "), ""]
    lines += [f"{stage.seconds:6.1f} s  {plain(stage.name)}: {plain(stage.outcome)}" for stage in report.stages]
    lines += [f"{report.seconds:6.1f} s  in all", ""]
    for text in files_text(report.files):
        lines += textwrap.wrap(plain(text), width)
    lines += textwrap.wrap(LIMITS, width)
    return "\n".join(lines)


def files_text(files: Files) -> list[str]:
    """Returns how the user's files were kept, and what was written elsewhere, in sentences."""
    if not files.protection:
        return []
    found = [f"Your files were kept from the code by {_PROTECTIONS[files.protection]}.", *files.not_covered]
    if files.kept:
        found.append(f"What the code wrote is in {files.kept}.")
    if files.remote:
        found.append(f"The code connected to {', '.join(files.remote)}: what it wrote there is not undone.")
    return found


def headline(report: Report) -> str:
    """Returns the result in a few words, a number or one word first."""
    faults = len(report.faults)
    if faults:
        return f"{faults} {'fault' if faults == 1 else 'faults'}"
    if report.hang:
        return "a rank failed, hung or was lost"
    if report.error:
        return "fails on one process already"
    # A check that was not made has found nothing.
    missing = len({finding.code for finding in report.of(Verdict.CANNOT_TELL)})
    made = len(report.checks) - missing
    rest = f", {missing} could not be made" if missing else ""
    return f"no fault found by {made} {'check' if made == 1 else 'checks'}{rest}"


def plain(text: str) -> str:
    """Returns a text of the examined code on one line, without characters that change what is shown around it."""
    return safe(" ".join(text.split()))


def safe(text: str) -> str:
    """Returns a text of several lines, without characters that change what is shown around it."""
    return _DECEPTIVE.sub(lambda found: f"\\u{ord(found[0]):04x}", _escaped(text.expandtabs(4)))


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def facts(finding: Finding) -> list[str]:
    """Returns where and how much, in short parts."""
    parts = [f"step {finding.step}"] if finding.step is not None else []
    return [*parts, *(plain(part) for part in (finding.tensor, finding.amount) if part)]


def _finding(finding: Finding, width: int, program: str) -> list[str]:
    check = describe().get(finding.code)
    title = f" {check.title}" if check else ""
    lines = [f"{MARKS[finding.verdict]} {plain(finding.code)}{title} ({finding.verdict.value})"]
    for text in (finding.message, finding.proof):
        lines += textwrap.wrap(plain(text), width, initial_indent="  ", subsequent_indent="  ")
    if parts := facts(finding):
        lines += textwrap.wrap("; ".join(parts), width, initial_indent="  ", subsequent_indent="  ")
    if finding.place:
        lines += textwrap.wrap(f"at {plain(finding.place)}", width, initial_indent="  ", subsequent_indent="  ")
    if check:
        lines += textwrap.wrap(f"fix: {check.short_fix}", width, initial_indent="  ", subsequent_indent="  ")
        lines.append(f"  more: {program} --explain {finding.code}")
    return lines


def _grouped(report: Report, verdict: Verdict, width: int) -> list[str]:
    texts = [f"{', '.join(codes)}: {message}" for message, codes in by_message(report.of(verdict)).items()]
    if not texts:
        return []
    return [*textwrap.wrap(f"{MARKS[verdict]} {verdict.value}: {' '.join(texts)}", width, subsequent_indent="  "), ""]


def by_message(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Returns the codes of findings by the message that they share."""
    found: dict[str, list[str]] = {}
    for finding in findings:
        found.setdefault(plain(finding.message), []).append(plain(finding.code))
    return found
