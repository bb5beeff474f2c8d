"""Where a finding is in the user's files: what output formats, comments and baselines refer to. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from ddp_doctor.findings import Finding, Report

_PLACE = re.compile(r"(.+):(\d+)(?: in (.+))?")


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
    return Place(from_root(found[1]), int(found[2]), found[3] or "") if found else None


def shown_place(finding: Finding, report: Report) -> Place | None:
    """Returns where a finding is shown: at its own line, or at the start of the examined file."""
    if own := place_of(finding):
        return own
    for word in re.split(r"[ :]", report.target):
        if word.endswith(".py") and Path(word).is_file():
            return Place(from_root(word), 1, "")
    return None


def from_root(path: str) -> str:
    """Returns a path relative to the root of the repository, with `/`; the absolute one if it is not in it."""
    # The root is where a workflow of GitHub has checked out the repository, otherwise the current folder.
    root = os.environ.get("GITHUB_WORKSPACE", "")
    whole = Path(path).absolute()
    for folder in filter(None, (root, str(Path.cwd()))):
        if whole.is_relative_to(folder):
            return whole.relative_to(folder).as_posix()
    return whole.as_posix()
