"""The report as text for the terminal. Imports no torch."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from ddp_doctor.faults import load_checks, short_fix
from ddp_doctor.findings import DEFECT, MADE, REASONS, Finding, Report, Verdict

MARKS = {Verdict.FAULT: "✗", Verdict.DEPENDS: "≈", Verdict.UNCLEAR: "?", Verdict.NOTE: "·"}
# Bold red, yellow, and cyan, by the mark at the beginning of a line.
_STYLES = {"✗ LD": "1;31", "≈ LD": "33", "? LD": "36"}
_LIMITS = (
    "Not examined: faults of hardware, NCCL and streams, sharded and pipelined models, nondeterministic cuDNN, and "
    "what begins after these steps."
)
_PROTECTIONS = {"private view": "a private view of all files", "copy": "a copy of the current folder"}
# The states of checks, those first that leave a question open.
STATES = (*REASONS, MADE)
_LONGEST_OUTPUT = 6000


def print_text(text: str, stream: TextIO | None = None) -> None:
    """Prints a text, on a terminal with colors; the reader of a pipe may have gone, which ends nothing."""
    stream = stream or sys.stdout
    lines = safe(text).split("\n")
    if stream.isatty() and not (os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"):
        lines = [f"\x1b[{_STYLES[line[:4]]}m{line}\x1b[0m" if line[:4] in _STYLES else line for line in lines]
    try:
        print("\n".join(lines), file=stream, flush=True)
    except OSError:
        # What is still in the buffer also goes nowhere.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def safe(text: str) -> str:
    """Returns a text without characters that change what is shown around it: they are written as escapes."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text.expandtabs(4)
    )


def plain(text: str) -> str:
    """Returns a text of the examined code on one line, without characters that change what is shown around it."""
    return safe(" ".join(text.split()))


def report_text(report: Report, *, verbose: bool = False) -> str:
    """Returns the report, the most serious findings first. Text of the examined code cannot control the terminal.

    Args:
        report: The report.
        verbose: Whether every check is listed with its state, not only those that cannot tell.
    """
    if not report.devices:
        return _reading_text(report)
    blocks = ["", _wrapped([headline(report), examined(report), counts(report)])]
    for finding in report.findings:
        title = f"{MARKS[finding.verdict]} {title_of(finding.code)} ({finding.verdict.value})"
        blocks += ["", _wrapped([title]), _wrapped(told(finding), "  ")]
    for title, text in outputs(report).items():
        blocks += ["", f"{title}:", textwrap.indent(text, "  ")]
    rows = [
        f"- accepted: {one.finding.code} at {plain(one.finding.place) or 'no line'}: {plain(one.reason)}"
        for one in report.accepted
    ]
    for state in STATES if verbose else STATES[:1]:
        for reason, codes in by_reason(report, state).items():
            rows.append(f"- {state}: {', '.join(codes)}{reason and ': '}{reason}")
    blocks += ["", _wrapped(rows)] if rows else []
    blocks += ["", *(f"{stage.seconds:6.1f} s  {plain(stage.name)}: {plain(stage.outcome)}" for stage in report.stages)]
    return "\n".join([*blocks, f"{report.seconds:6.1f} s  in all", "", _wrapped(remarks(report))])


def _reading_text(report: Report) -> str:
    """Returns what was read, one line for each finding, as linters print them."""
    lines = []
    for finding in report.findings:
        check = load_checks()[finding.code]
        lines += [f"{plain(finding.place)}: {finding.code} {plain(finding.message)}", f"    fix: {short_fix(check)}"]
    return "\n".join([*lines, f"{headline(report)} {report.stages[0].outcome} in {report.seconds:.1f} s."])


def _wrapped(texts: Iterable[str], indent: str = "") -> str:
    """Returns texts with lines as wide as the terminal, up to 118 characters."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 118)
    return "\n".join(
        textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent or "  ") for text in texts
    )


def examined(report: Report) -> str:
    """Returns what was examined, and how."""
    compared = ", compared with one process" if report.comparison and report.comparison.made else ""
    how = f"on {report.devices} ranks{compared}" if report.devices else "was read"
    return f"{plain(report.target)} {how}"


def headline(report: Report) -> str:
    """Returns the result in one sentence, which says if the comparison with one process was not made."""
    result, compared = _result(report), report.comparison
    if compared is None or compared.made or report.hang or report.error:
        return f"{result}."
    return f"{result}; the comparison with one process was not made, because {plain(compared.reason).rstrip('.')}."


def _result(report: Report) -> str:
    if faults := len(report.faults):
        likely = "" if report.devices else "likely "
        return f"{faults} {likely}{'fault' if faults == 1 else 'faults'} found"
    if DEFECT in (report.error or report.hang):
        return "The doctor failed on this program, which runs without it"
    if report.hang:
        return "A rank failed, hung or was lost"
    if report.error:
        how = "with emulated GPUs" if report.emulated_gpus else "on one process already"
        return f"The program fails {how}"
    return f"No fault found, {len(report.accepted)} accepted" if report.accepted else "No fault found"


def counts(report: Report) -> str:
    """Returns how many checks ended in each state: `checks: 21 made, 9 not reached, 3 cannot tell`."""
    parts = [f"{len(found)} {state}" for state in reversed(STATES) if (found := report.ended(state))]
    return f"checks: {', '.join(parts) or 'none'}"


def title_of(code: str) -> str:
    """Returns a code, and the title of its check."""
    return f"{code} {load_checks()[code].TITLE}"


def observed(finding: Finding) -> list[str]:
    """Returns the evidence, the proof, where and how much, and the place."""
    step = "" if finding.step is None else f"step {finding.step}"
    facts = "; ".join(part for part in (step, finding.tensor, finding.amount) if part)
    place = f"at {finding.place}" if finding.place else ""
    return [plain(line) for line in (finding.message, finding.proof, facts, place) if line]


def told(finding: Finding) -> list[str]:
    """Returns what was observed, the fix, and what explains it."""
    fix = short_fix(load_checks()[finding.code])
    return [*observed(finding), f"fix: {fix}", f"more: ddp-doctor --explain {finding.code}"]


def outputs(report: Report) -> dict[str, str]:
    """Returns the stacks of ranks that hung and the error of the examined code, as far as there are some."""
    texts = {"The ranks": report.hang, "The error": report.error}
    return {title: safe(text.rstrip()[-_LONGEST_OUTPUT:]) for title, text in texts.items() if text}


def by_reason(report: Report, state: str) -> dict[str, list[str]]:
    """Returns the codes of the checks that ended in a state, by the reason that they share."""
    found: dict[str, list[str]] = {}
    for check in report.ended(state):
        found.setdefault(plain(check.reason), []).append(check.code)
    return found


def remarks(report: Report) -> list[str]:
    """Returns what an examination like this one cannot show, and how the user's files were kept, in sentences."""
    found, files = [], report.files
    if report.emulated_gpus:
        found.append(
            f"The code was examined with {report.emulated_gpus} emulated GPUs, which compute on the CPU. This cannot "
            "show what is specific to a GPU: its memory and speed, the order of its streams, its rounding and its "
            "kernels, NCCL, and compiled code, which was run eagerly. A failure may be a limit of the emulation."
        )
    if files.protection:
        found.append(f"Your files were kept from the code by {_PROTECTIONS[files.protection]}.")
    found += files.not_covered
    if files.remote:
        found.append(f"The code connected to {', '.join(files.remote)}: what it wrote there is not undone.")
    return [*map(plain, found), _LIMITS]
