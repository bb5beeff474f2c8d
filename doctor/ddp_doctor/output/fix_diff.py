"""The fix of a finding in the user's own lines, where it can be written without knowing more. Imports no torch."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_doctor.findings import Finding
from ddp_doctor.output.rewrites import REWRITES, Change, Source
from ddp_doctor.places import place_of

_CONTEXT = 2


class Line(NamedTuple):
    """A line of an excerpt; its sign is a space, `-`, `+`, or `>` for the line of the finding itself."""

    number: int
    sign: str
    text: str


def excerpt(finding: Finding) -> list[Line]:
    """Returns the lines around a finding, with its fix as a diff if it can be written; empty without the file.

    The indentation that all lines share is removed.
    """
    source = _read(finding)
    if source is None:
        return []
    rewrite = REWRITES.get(finding.code)
    lines = _changed(source, rewrite(source) if rewrite else None)
    texts = textwrap.dedent("\n".join(line.text.expandtabs(4) for line in lines)).split("\n")
    return [line._replace(text=text) for line, text in zip(lines, texts, strict=False)]


def _changed(source: Source, change: Change | None) -> list[Line]:
    lines = source.lines
    # Without a change, the line of the finding is marked.
    at, removed, added = change or Change(source.at, 1, [])
    first, last = max(at - _CONTEXT, 0), min(at + max(removed, 1) + _CONTEXT, len(lines))
    return [
        *(Line(n + 1, " ", lines[n]) for n in range(first, at)),
        *(Line(n + 1, "-" if change else ">", lines[n]) for n in range(at, at + removed)),
        *(Line(0, "+", text) for text in added),
        *(Line(n + 1, " ", lines[n]) for n in range(at + removed, last)),
    ]


def _read(finding: Finding) -> Source | None:
    place = place_of(finding)
    # The place is relative to the current folder.
    path = Path(finding.place.rpartition(":")[0]) if place else Path()
    if place is None or path.suffix != ".py" or not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        source = Source(text.splitlines(), ast.parse(text), place.line - 1)
    except (OSError, ValueError, SyntaxError):
        return None
    return source if 0 <= source.at < len(source.lines) else None


def is_diff(lines: Sequence[Line]) -> bool:
    """Returns whether an excerpt changes something."""
    return any(line.sign in "-+" for line in lines)
