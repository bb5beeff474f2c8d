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

from ddp_doctor.faults import describe
from ddp_doctor.findings import CheckState, Finding, Report, State, Verdict
from ddp_doctor.findings import DEFECT, Comparison, Files
from ddp_doctor.output.links import page_address

MARKS = {
    Verdict.FAULT: "✗",
    Verdict.DEPENDS: "≈",
    Verdict.UNCLEAR: "?",
    Verdict.NOTE: "·",
}
_MEANINGS = {
    State.NOT_REACHED: "the program does not do this",
    State.NOT_APPLICABLE: "the property has no meaning here",
}
LIMITS = (
    "Not examined: faults of hardware, NCCL and streams, sharded and pipelined models, nondeterministic cuDNN, and "
    "what begins after these steps."
)
_EMULATION = (
    "This cannot show what is specific to a GPU: its memory and speed, the order of its streams, its rounding and its "
    "kernels, NCCL, and compiled code, which was run eagerly."
)
_PROTECTIONS = {"private view": "a private view of all files", "copy": "a copy of the current folder"}
# The states of checks that were not made, those first that leave a question open.
NOT_MADE = (State.CANNOT_TELL, State.NOT_APPLICABLE, State.NOT_REACHED)
# Bold red, yellow, and cyan, by the mark at the beginning of a line.
_STYLES = {"✗ ": "1;31", "≈ ": "33", "? ": "36"}
_FINDING = re.compile(rf"(?P<mark>[{''.join(MARKS.values())}]) (?P<code>LD\d+)\b")
# Control characters except the newline, and surrogates, which cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Characters that reorder or hide the text around them, and separators of lines.
_DECEPTIVE = re.compile("[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Prints a text; the reader of a pipe may have gone, which ends nothing."""
    stream = stream or sys.stdout
    try:
        print(_shown(_escaped(text), stream), file=stream, flush=True)
    except OSError:
        # What is still in the buffer also goes nowhere.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _shown(text: str, stream: TextIO) -> str:
    """Returns a text for a stream: a terminal gets lines that end at words, and marks in color."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size((100, 24)).columns
    lines: list[str] = []
    for line in text.split("\n"):
        # Lines with an indent are code, and commands to copy.
        whole = len(line) <= width or line[:1].isspace()
        lines += [line] if whole else textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(_decorated, lines) if has_color(stream) else lines)


def has_color(stream: TextIO) -> bool:
    """Returns whether a stream shows escape codes, such as those of colors, as they are meant."""
    plain_only = os.environ.get("NO_COLOR") or os.environ.get("CI") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain_only


def _decorated(line: str) -> str:
    """Returns a line; the first one of a finding with the color of its mark, and its code as a link to the page."""
    style = _STYLES.get(line[:2])
    if (found := _FINDING.match(line)) and (address := page_address(found["code"])):
        link = f"\x1b]8;;{address}\x1b\\{found['code']}\x1b]8;;\x1b\\"
        line = f"{found['mark']} {link}{line[found.end() :]}"
    return line if style is None else f"\x1b[{style}m{line}\x1b[0m"


def report_text(report: Report, program: str = "ddp-doctor", *, verbose: bool = False) -> str:
    """Returns the report, the most serious findings first. Text of the examined code cannot control the terminal.

    Args:
        report: The report.
        program: The command that explains a check, as it can be pasted.
        verbose: Whether every check is listed with its state, not only those that cannot tell.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, 118)
    lines = ["", *textwrap.wrap(headline(report), width)]
    compared = ", compared with one process" if report.comparison and report.comparison.made else ""
    where = f"{plain(report.target)} on {report.devices} ranks{compared}"
    lines += textwrap.wrap(where, width, subsequent_indent="  ")
    lines += [*textwrap.wrap(counts(report), width, subsequent_indent="  "), ""]
    for finding in report.findings:
        lines += [*_finding(finding, width, program), ""]
    for title, text in (("The ranks", report.hang), ("The error", report.error)):
        if text:
            lines += [f"{title}:", textwrap.indent(safe(text.rstrip()[-6000:]), "  "), ""]
    for one in report.accepted:
        text = f"- accepted: {one.finding.code} at {plain(one.finding.place) or 'no line'}: {plain(one.reason)}"
        lines += textwrap.wrap(text, width, subsequent_indent="  ")
    lines += [""] if report.accepted else []
    for state in NOT_MADE if verbose else NOT_MADE[:1]:
        lines += _grouped(report, state, width)
    if verbose and (made := [check.code for check in report.ended(State.MADE)]):
        lines += [*textwrap.wrap(f"- made: {', '.join(made)}", width, subsequent_indent="  "), ""]
    for text in emulation_text(report):
        lines += [*textwrap.wrap(text, width), ""]
    lines += [f"{stage.seconds:6.1f} s  {plain(stage.name)}: {plain(stage.outcome)}" for stage in report.stages]
    lines += [f"{report.seconds:6.1f} s  in all", ""]
    for text in files_text(report.files):
        lines += textwrap.wrap(plain(text), width)
    lines += [*textwrap.wrap(LIMITS, width), *_next(report, program)]
    return "\n".join(lines)


def _next(report: Report, program: str) -> list[str]:
    """Returns the command that follows, in the column that all commands share."""
    if report.faults:
        return ["", f"explain   {program} --explain {report.faults[0].code}"]
    return [] if report.error or report.hang else ["", f"watch     {program} watch -- COMMAND"]


def emulation_text(report: Report) -> list[str]:
    """Returns that GPUs were emulated, and what that cannot show, in sentences; nothing if they were not."""
    if not report.emulated_gpus:
        return []
    found = [f"The code was examined with {report.emulated_gpus} emulated GPUs, which compute on the CPU. {_EMULATION}"]
    if report.error or report.hang:
        found.append(
            "The failure may come from the emulation: that is a limit of the doctor, not a fault of the code. "
            "Examine it on a machine with GPUs."
        )
    return found


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
    """Returns the result in one sentence, which says if the comparison with one process was not made."""
    result, compared = verdict(report), report.comparison
    if compared is None and not report.exit_code and report.checks:
        compared = Comparison(reason="none of the chosen checks needs it")
    if compared is None or compared.made or report.hang or report.error:
        return f"{result}."
    text = f"{result}; the comparison with one process was not made, because {plain(compared.reason).rstrip('.')}."
    return f"{text} {compared.option}".rstrip()


def verdict(report: Report) -> str:
    """Returns the result in a few words."""
    faults = len(report.faults)
    if faults:
        return f"{faults} {'fault' if faults == 1 else 'faults'} found"
    if DEFECT in (report.error or report.hang):
        return "The doctor failed on this program, which runs without it"
    if report.hang:
        return "A rank failed, hung or was lost"
    if report.error and report.emulated_gpus:
        return "The program fails with emulated GPUs"
    if report.error:
        return "The program fails on one process already"
    return f"No fault found, {len(report.accepted)} accepted" if report.accepted else "No fault found"


def counts(report: Report) -> str:
    """Returns how many checks ended in each state: `checks: 21 made, 9 not reached (...), 3 cannot tell`."""
    parts = []
    for state in State:
        if number := len(report.ended(state)):
            meaning = f" ({_MEANINGS[state]})" if state in _MEANINGS else ""
            parts.append(f"{number} {state.value}{meaning}")
    return f"checks: {', '.join(parts) or 'none'}"


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


def _grouped(report: Report, state: State, width: int) -> list[str]:
    lines = []
    for reason, codes in by_reason(report.ended(state)).items():
        named = f"all {len(codes)} checks" if len(codes) == len(report.checks) > 1 else ", ".join(codes)
        lines += textwrap.wrap(f"- {state.value}: {named}: {reason}", width, subsequent_indent="  ")
    return [*lines, ""] if lines else []


def by_reason(checks: Sequence[CheckState]) -> dict[str, list[str]]:
    """Returns the codes of checks by the reason that they share."""
    found: dict[str, list[str]] = {}
    for check in checks:
        found.setdefault(plain(check.reason), []).append(plain(check.code))
    return found
