"""Writes the measurements of the fault suite into docs/reliability.md: run by `make soak` after the tests."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- end of metrics -->\n"


def main(measurements: Path) -> None:
    """Replaces the table on the page by the newest measurement of each row."""
    rows = {row["row"]: row["value"] for row in map(json.loads, measurements.read_text().splitlines())}
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    cores = len(os.sched_getaffinity(0))
    table = [
        f"Seen on {time.strftime('%Y-%m-%d')}: {cores} cores, Python {platform.python_version()}, {packages}.\n",
        "\n| fault | seen |\n|---|---|\n",
        *(f"| {row} | {value} |\n" for row, value in sorted(rows.items())),
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{''.join(table)}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
