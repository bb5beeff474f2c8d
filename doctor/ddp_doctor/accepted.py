"""Findings that the user accepts, by a comment in the source line or by a baseline; and where findings are.

norm = nn.BatchNorm2d(64)  # ddp-doctor: ignore[LD012] the batch of a rank is large

Imports no torch.
"""

import ast
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddp_doctor.errors import InputError
from ddp_doctor.findings import Accepted, Finding, Report

_PLACE = re.compile(r"(.+):(\d+)(?: in (.+))?")
_COMMENT = re.compile(r"#\s*ddp-doctor:\s*ignore\[(?P<codes>[^\]]*)\][\s:,-]*(?P<reason>\S.*)")


class Place(NamedTuple):
    """A line of a file.

    Attributes:
        path: The file, relative to the root of the repository if it is in it.
        line: The line, from 1.
        function: The function; empty if it is not known.
    """

    path: str
    line: int
    function: str


def place_of(finding: Finding) -> Place | None:
    """Returns where a finding is, or None if that is not known."""
    found = _PLACE.fullmatch(finding.place)
    return Place(_from_root(found[1]), int(found[2]), found[3] or "") if found else None


def shown_place(finding: Finding, report: Report) -> Place | None:
    """Returns where a finding is shown: at its own line, or at the start of the examined file."""
    files = [word for word in re.split(r"[ :]", report.target) if word.endswith(".py") and Path(word).is_file()]
    return place_of(finding) or next((Place(_from_root(file), 1, "") for file in files), None)


def _from_root(path: str) -> str:
    """Returns a path relative to the root of the repository, with `/`; the absolute one if it is not in it."""
    # The root is where a workflow of GitHub has checked out the repository, otherwise the current folder.
    whole = Path(path).absolute()
    for folder in filter(None, (os.environ.get("GITHUB_WORKSPACE", ""), str(Path.cwd()))):
        if whole.is_relative_to(folder):
            return whole.relative_to(folder).as_posix()
    return whole.as_posix()


def key_of(finding: Finding) -> tuple[str, str, str]:
    """Returns what identifies a finding in another version of the code, its file and its function: a line may move."""
    place = _PLACE.fullmatch(finding.place)
    return (finding.code, place[1], place[3] or "") if place else (finding.code, "", "")


def accept_comments(report: Report) -> Report:
    """Moves the findings that a comment in their statement, or in a line of its own above it, accepts."""
    return _accept(report, "comment", _reason)


def accept_baseline(report: Report, path: str) -> Report:
    """Moves the findings that a baseline holds."""
    known = read_baseline(path)
    return _accept(report, "baseline", lambda finding: path if key_of(finding) in known else "")


def _accept(report: Report, by: str, reason_for: Callable[[Finding], str]) -> Report:
    reasons = [(finding, reason_for(finding)) for finding in report.findings]
    accepted = [Accepted(finding, by, reason) for finding, reason in reasons if reason]
    rest = [finding for finding, reason in reasons if not reason]
    return replace(report, findings=rest, accepted=[*report.accepted, *accepted])


def _reason(finding: Finding) -> str:
    """Returns the reason that a comment gives for a finding, or an empty text."""
    place = _PLACE.fullmatch(finding.place)
    if place is None:
        return ""
    try:
        text = Path(place[1]).read_text(encoding="utf-8")
        statement = _statement(ast.parse(text), int(place[2]))
    except (OSError, ValueError, SyntaxError):
        return ""
    lines = dict(enumerate(text.splitlines(), 1))
    own = [lines[line] for line in statement if line in lines]
    above = lines.get(statement[0] - 1, "").strip()
    for line in [*own, *([above] if above.startswith("#") else [])]:
        found = _COMMENT.search(line)
        if found and finding.code in {code.strip().upper() for code in found["codes"].split(",")}:
            return found["reason"].strip()
    return ""


def _statement(tree: ast.Module, line: int) -> range:
    """Returns the lines of the innermost statement in a line, of a block only its head."""
    ranges = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(body[0].lineno - 1 if body else node.end_lineno or 0, node.lineno)
            ranges += [range(node.lineno, end + 1)] if node.lineno <= line <= end else []
    return min(ranges, key=len, default=range(line, line + 1))


def baseline_text(report: Report) -> str:
    """Returns a baseline with the findings of a report."""
    rows = {key_of(finding): finding.message for finding in report.findings}
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
        return {(str(row["code"]), str(row["file"]), str(row["function"])) for row in content["findings"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"--baseline {path} is no file of --write-baseline: {type(error).__name__}: {error}"
        raise InputError(message) from error
