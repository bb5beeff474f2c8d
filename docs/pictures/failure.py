"""Draws what a run prints if a rank is killed: failure.txt to failure.svg."""

from __future__ import annotations

import textwrap
from pathlib import Path

from doctor import COLUMNS, draw

HERE = Path(__file__).parent


def main() -> None:
    """Writes failure.svg."""
    lines: list[str] = []
    for line in (HERE / "failure.txt").read_text(encoding="utf-8").splitlines():
        words = line.split()
        # The notes before the training are left out.
        if words and words[0] not in {"note:", "step", "epoch"}:
            lines += [*textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_on_hyphens=False), ""]
    title = "A run whose rank 1 is killed in step 50: the message names the rank, and the command that resumes."
    (HERE / "failure.svg").write_text(draw(lines[:-1], title), encoding="utf-8")


if __name__ == "__main__":
    main()
