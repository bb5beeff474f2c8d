"""What the standard output can show: its width, whether lines are drawn again, and whether there are colors.

A terminal gets a progress bar, colors, and lines that end at words. A pipe and a file get whole lines, which programs
read. NO_COLOR (https://no-color.org), a terminal that is `dumb`, and CI get no escape codes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TextIO

# Narrower text is not readable; a wider line is hard to read.
NARROWEST, WIDEST = 40, 120
LABEL = 10
_LABELLED = re.compile(r"[\w-]+ {2,}")
_COMMAND = re.compile(r"(?<=: )(?:python|lit-mnist|ddp-doctor|torchrun|pip) .*$")


def is_terminal(stream: TextIO | None = None) -> bool:
    """Returns whether a person reads a stream, by default the standard output, at a terminal."""
    try:
        return (stream or sys.stdout).isatty()
    except ValueError:
        return False


def can_redraw() -> bool:
    """Returns whether a line can be drawn again, as a progress bar does. The log of a CI keeps every line."""
    return is_terminal() and not _is_ci() and os.environ.get("TERM") != "dumb"


def has_color() -> bool:
    """Returns whether escape codes, such as those of colors, are shown as they are meant."""
    return can_redraw() and not os.environ.get("NO_COLOR")


def width_of_text() -> int:
    """Returns the width of text, from the terminal or from COLUMNS."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((100, 24)).columns))


def labelled(label: str, text: str) -> str:
    """Returns a line of a result, such as `tested    98.52%`."""
    return f"{label:<{LABEL - 1}} {text}"


def fitted(text: str, stream: TextIO | None = None) -> str:
    """Returns a text whose lines end at words at the width of a terminal; other streams get it as it is.

    Paths are not divided. A command, which follows a label or a colon, can be copied: its lines end with a backslash.
    """
    if not is_terminal(stream):
        return text
    width = max(NARROWEST, shutil.get_terminal_size((100, 24)).columns)
    return "\n".join(part for line in text.split("\n") for part in _fit(line, width))


def _fit(line: str, width: int) -> list[str]:
    # Lines with an indent are code, tracebacks and tables.
    if len(line) <= width or line[:1].isspace():
        return [line]
    label = _LABELLED.match(line)
    indent = len(label[0]) if label else 2
    if label and _COMMAND.match(f": {line[indent:]}", 2):
        return _fit_command(line, width, indent)
    if command := _COMMAND.search(line):
        prose = _wrapped(line[: command.start()].rstrip(), width, indent)
        return [*prose, *_fit_command(" " * indent + command[0], width, indent)]
    return _wrapped(line, width, indent)


def _wrapped(line: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _fit_command(line: str, width: int, indent: int) -> list[str]:
    """Divides a command before its flags."""
    first, *flags = re.split(r" (?=--\w)", line)
    lines = [first]
    for flag in flags:
        if len(lines[-1]) + len(flag) + 3 > width:
            lines[-1] += " \\"
            lines.append(" " * (indent + 2) + flag)
        else:
            lines[-1] += f" {flag}"
    return lines


def _is_ci() -> bool:
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}
