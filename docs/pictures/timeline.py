"""Draws a kill, a restart and a resume, from what a run printed: timeline.txt to timeline.svg."""

from __future__ import annotations

import re
from pathlib import Path

from svg import Picture

HERE = Path(__file__).parent
LEFT, WIDTH = 62, 348


def main() -> None:
    """Writes timeline.svg."""
    text = (HERE / "timeline.txt").read_text(encoding="utf-8")
    every, last, killed, resumed = (
        int(found[1])
        for pattern in (r"--save-every (\d+)", r"--max-steps (\d+)", r"in step (\d+)\.", r"after step (\d+)")
        if (found := re.search(pattern, text))
    )
    title = (
        f"Two ranks save every {every} steps. Rank 1 is killed in step {killed}, both restart from step {resumed}, and "
        f"steps {resumed + 1} to {killed - 1} are computed twice."
    )
    picture = Picture(430, 316, title)

    def x(step: int) -> float:
        return LEFT + WIDTH * step / last

    picture.text(16, 28, "a kill, a restart and a resume", style="bold")
    for top, label in ((52, "rank 0"), (82, "rank 1")):
        picture.text(16, top + 15, label, "faint", size=12)
        picture.box(x(0), top, x(killed) - x(0), 22, "blue", solid=True)
    picture.text(x(killed) + 12, 98, f"✗ SIGKILL in step {killed}", "red", size=12, style="bold")
    picture.text(x(killed) + 12, 68, "ends: its peer is gone", "faint", size=12)
    for step in range(every, killed, every):
        picture.dot(x(step), 122, "green")
    picture.text(16, 126, "saved", "faint", size=12)
    picture.line([(x(resumed), 128), (x(resumed), 158)], "green", arrow=True)
    picture.text(x(resumed) + 12, 148, f"all ranks restart, and load step {resumed}", "green", size=12)
    for top, label in ((164, "rank 0"), (194, "rank 1")):
        picture.text(16, top + 15, label, "faint", size=12)
        picture.box(x(resumed), top, x(last) - x(resumed), 22, "blue", solid=True)
        picture.box(x(resumed), top, x(killed) - x(resumed), 22, "orange", solid=True)
    for step in range(resumed + every, last + 1, every):
        picture.dot(x(step), 234, "green")
    picture.text(16, 238, "saved", "faint", size=12)
    picture.line([(x(0), 252), (x(last), 252)])
    for step in range(0, last + 1, every):
        picture.text(x(step), 270, str(step), "faint", size=12, anchor="middle")
    picture.text(16, 270, "step", "faint", size=12)
    picture.box(16, 288, 14, 14, "orange", solid=True)
    picture.text(38, 300, f"computed again: steps {resumed + 1} to {killed - 1}. The weights are equal.", size=12)
    (HERE / "timeline.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
