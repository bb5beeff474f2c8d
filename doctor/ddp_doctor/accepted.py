"""Findings that the user accepts: by a comment in the source line, or by a baseline. Imports no torch.

norm = nn.BatchNorm2d(64)  # ddp-doctor: ignore[LD012] the batch of a rank is large
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddp_doctor.errors import InputError
from ddp_doctor.faults import describe
from ddp_doctor.findings import Accepted, Finding, Report, State, Verdict
from ddp_doctor.places import Place, from_root, place_of

_COMMENT = re.compile(r"#\s*ddp-doctor:\s*ignore\b(?:\[([^\]]*)\])?[\s:,-]*(.*)")
# The code of what is wrong with a comment itself.
_COMMENTS = "LD000"


class _Ignore(NamedTuple):
    """A comment. Its lines are those of the statement that it belongs to."""

    path: str
    line: int
    lines: range
    codes: tuple[str, ...]
    reason: str

    def accepts(self, code: str, place: Place) -> bool:
        """Returns whether it accepts a finding."""
        here = from_root(self.path) == place.path and place.line in self.lines
        return here and code in self.codes and bool(self.reason)


def accept_comments(report: Report, files: Iterable[str]) -> Report:
    """Moves the findings that a comment in their line accepts, and notes comments that match nothing.

    Args:
        report: The report.
        files: The files of the examined program.
    """
    ignores = [ignore for path in sorted(set(files)) for ignore in _ignores(path)]
    rest, accepted, used = [], list(report.accepted), set()
    for finding in report.findings:
        place = place_of(finding)
        found = next((ignore for ignore in ignores if place and ignore.accepts(finding.code, place)), None)
        if found:
            used.add((found, finding.code))
            accepted.append(Accepted(finding, "comment", found.reason))
        else:
            rest.append(finding)
    # A check that was not made may find something another time.
    made = {check.code for check in report.ended(State.MADE)}
    for ignore in ignores:
        wrong = [] if ignore.codes else ["it names no check"]
        for code in ignore.codes:
            if code not in describe():
                wrong.append(f"there is no check {code}")
            elif not ignore.reason:
                wrong.append(f"it gives no reason for {code}, so it has no effect")
            elif code in made and (ignore, code) not in used:
                wrong.append(f"{code} finds nothing in this line")
        notes = [
            f"A comment has codes and a reason, such as ignore[LD012] large batches: here, {why}." for why in wrong
        ]
        rest += [Finding(_COMMENTS, Verdict.NOTE, note, place=f"{ignore.path}:{ignore.line}") for note in notes]
    return replace(report, findings=rest, accepted=accepted)


def _ignores(path: str) -> list[_Ignore]:
    """Returns the comments of a file; none if it cannot be read as Python."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if "ddp-doctor" not in text:
            return []
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    except (OSError, ValueError, SyntaxError, tokenize.TokenError):
        return []
    found = []
    for token in tokens:
        if token.type == tokenize.COMMENT and (match := _COMMENT.match(token.string)):
            line = token.start[0]
            codes = tuple(code.strip().upper() for code in (match[1] or "").split(",") if code.strip())
            # A comment in a line of its own belongs to the next one.
            alone = not token.line[: token.start[1]].strip()
            found.append(_Ignore(path, line, _lines(statements, line + alone), codes, match[2].strip()))
    return found


def _lines(statements: list[ast.stmt], line: int) -> range:
    """Returns the lines of the innermost statement in a line, of a block only its head."""
    ranges = []
    for node in statements:
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        if node.lineno <= line <= max(end, node.lineno):
            ranges.append(range(node.lineno, max(end, node.lineno) + 1))
    return min(ranges, key=len, default=range(line, line + 1))


def baseline_text(report: Report) -> str:
    """Returns a baseline with all findings of a report, accepted ones by a baseline included."""
    findings = [*report.findings, *(one.finding for one in report.accepted if one.by == "baseline")]
    rows = {_key(finding): finding.message for finding in findings if finding.code != _COMMENTS}
    found = [
        {"code": code, "file": path, "function": function, "message": message}
        for (code, path, function), message in sorted(rows.items())
    ]
    return json.dumps({"format": 1, "findings": found}, indent=2) + "\n"


def read_baseline(path: str) -> set[tuple[str, str, str]]:
    """Returns the code, file and function of each finding of a baseline.

    Raises:
        InputError: It is no baseline.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        found = {(str(row["code"]), str(row["file"]), str(row["function"])) for row in content["findings"]}
        known = content["format"] == 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--baseline {path} is no file of --write-baseline: {type(error).__name__}: {error}"
        ) from error
    if not known:
        raise InputError(f"--baseline {path}: its format is {content['format']!r}, but 1 is known.")
    return found


def accept_baseline(report: Report, path: str) -> Report:
    """Moves the findings that a baseline holds. A line may move: the code, the file and the function count."""
    known = read_baseline(path)
    rest = [finding for finding in report.findings if _key(finding) not in known]
    accepted = [Accepted(finding, "baseline", path) for finding in report.findings if _key(finding) in known]
    return replace(report, findings=rest, accepted=[*report.accepted, *accepted])


def _key(finding: Finding) -> tuple[str, str, str]:
    place = place_of(finding)
    return finding.code, place.path if place else "", place.function if place else ""
