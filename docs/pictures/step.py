"""Draws the parts of one step of raw DDP and of Lightning: docs/bench/two-cores.json to step.svg.

`python -m benchmarks --topics waterfall` measured them, in five interleaved rounds.
"""

from __future__ import annotations

import json
from pathlib import Path

from svg import Picture

HERE = Path(__file__).parent
GROUPS = (
    ("data", "blue", ("data", "copy to device")),
    ("forward", "green", ("forward",)),
    ("batch norm's collectives", "purple", ("batch norm's collectives",)),
    ("backward", "orange", ("backward",)),
    ("all-reduce of the gradient", "red", ("all-reduce of the gradient",)),
)
OTHER = ("metrics, optimizer, logging, the loop", "text")
REST = ("gradient check and metrics", "optimizer", "logging", "progress bar", "signal check and keeping", "outside_ms")


def grouped(parts: dict[str, float]) -> list[tuple[str, str, float]]:
    """Returns the name, the color and the milliseconds of each group of parts."""
    groups = (*GROUPS, (*OTHER, REST))
    return [(name, color, sum(parts[part] for part in members)) for name, color, members in groups]


def main() -> None:
    """Writes step.svg."""
    text = (HERE.parent / "bench" / "two-cores.json").read_text(encoding="utf-8")
    measured = {row["name"]: row["others"] for row in json.loads(text)["topics"]["waterfall"]["rows"]}
    engines = {"raw DDP": "raw_ddp, traced", "Lightning": "lightning, traced"}
    rows = {name: grouped(measured[row]) for name, row in engines.items()}
    totals = {name: sum(row[2] for row in parts) for name, parts in rows.items()}
    said = ", ".join(f"{name} {total:.1f} ms" for name, total in totals.items())
    picture = Picture(430, 346, f"The parts of one training step on two ranks: {said}.")
    picture.text(16, 28, "one step on two ranks, batch 64, in ms", style="bold")
    scale = 382 / max(totals.values())
    for number, (name, parts) in enumerate(rows.items()):
        y, x = 48 + number * 72, 16.0
        picture.text(16, y + 12, f"{name}: {totals[name]:.1f}", size=13)
        for _, color, milliseconds in parts:
            picture.box(round(x, 1), y + 22, round(milliseconds * scale, 1), 30, color, solid=True)
            x += milliseconds * scale
    picture.text(334, 204, "raw DDP", "faint", size=12, anchor="end")
    picture.text(414, 204, "Lightning", "faint", size=12, anchor="end")
    for number, (first, second) in enumerate(zip(*rows.values(), strict=True)):
        y = 226 + number * 20
        picture.box(16, y - 11, 13, 13, first[1], solid=True)
        picture.text(38, y, first[0], size=13)
        picture.text(334, y, f"{first[2]:.1f}", size=13, anchor="end")
        picture.text(414, y, f"{second[2]:.1f}", size=13, anchor="end")
    (HERE / "step.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
