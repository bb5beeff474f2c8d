"""Draws the report of a real examination as it stands on a terminal: doctor.txt to doctor.svg.

python docs/pictures/doctor.py          # draws the saved report
python docs/pictures/doctor.py --run    # examines examples/doctor/train.py first, which takes about a minute
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from svg import Picture

HERE = Path(__file__).parent
COMMAND = "ddp-doctor -- torchrun --standalone --nproc-per-node 2 examples/doctor/train.py"
# So that the text can be read on a telephone.
COLUMNS = 54
SIZE, CELL, LEADING, MARGIN = 13, 7.83, 18.5, 16
TITLE = "A report of ddp-doctor: two faults, each with the step, the tensor, the amount, the line and the fix."
MARKS = {"✗": "red", "$": "blue"}


def examine() -> str:
    """Returns the report about the example, from the verdict on: the first line names a folder of this machine."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    done = subprocess.run(
        shlex.split(COMMAND), cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 1:
        raise SystemExit(f"The doctor should find the two faults of the example:\n{done.stdout}{done.stderr}")
    return done.stdout[done.stdout.index("2 faults found.") :]


def shown_lines(report: str) -> list[str]:
    """Returns the command, the verdict and the faults. What is left out is marked by a line of dots."""
    blocks = report.strip().split("\n\n")
    faults = [block for block in blocks if block.startswith("✗")]
    seconds = next(line.strip() for line in report.splitlines() if line.endswith("s  in all"))
    lines = [*textwrap.wrap(f"$ {COMMAND}", COLUMNS, subsequent_indent="    "), ""]
    for block in (blocks[0], *faults):
        lines += [*block.splitlines(), ""]
    return [*lines, "...", seconds]


def draw(lines: list[str], title: str) -> str:
    """Returns the lines of a terminal as a picture."""
    widest = max(len(line) for line in lines)
    picture = Picture(round(widest * CELL + 2 * MARGIN), round(len(lines) * LEADING + 1.5 * MARGIN), title)
    color = "text"
    for number, line in enumerate(lines):
        color = color_of(line, color)
        bold = "bold" if line[:1] in MARKS or line.endswith("found.") else ""
        y = MARGIN + number * LEADING + SIZE
        picture.text(MARGIN, y, line, color, size=SIZE, style=f"mono {bold}".strip())
    return picture.svg()


def color_of(line: str, before: str) -> str:
    """Returns the color of a line: a command and a fix can take several lines."""
    words = line.strip()
    if line[:1] in MARKS:
        return MARKS[line[0]]
    if words.startswith("fix:"):
        return "green"
    if words.startswith(("more:", "...")):
        return "faint"
    return before if words and before in {"blue", "green"} else "text"


def main() -> None:
    """Writes doctor.svg, and with --run doctor.txt before."""
    saved = HERE / "doctor.txt"
    if "--run" in sys.argv[1:]:
        saved.write_text(examine(), encoding="utf-8")
    (HERE / "doctor.svg").write_text(draw(shown_lines(saved.read_text(encoding="utf-8")), TITLE), encoding="utf-8")


if __name__ == "__main__":
    main()
