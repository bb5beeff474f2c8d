"""The progress of an examination: a line on a terminal, which is removed at the end, and a line per stage elsewhere."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest
from doctor_support import on_terminal
from test_checks import SPEC, Recorded, event, records

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.examination import _Examination
from ddp_doctor.output import progress
from ddp_doctor.output.progress import shown_progress

STAGES = [("one process", 1, 7), ("several ranks", 2, 7), ("several ranks", 2, 7), ("checks, emulated GPUs", 7, 7)]


def examined() -> int:
    """Shows stages as an examination does, and then prints a report."""
    progress._SECONDS_BETWEEN_DRAWINGS = 0.05  # type: ignore[misc]
    with shown_progress(sys.stdout) as shown:
        for stage in STAGES:
            shown.begin(*stage)
            time.sleep(0.5)
    print("1 fault found.", flush=True)
    return 0


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_a_terminal_has_one_line_that_is_removed(columns: int) -> None:
    drawn = on_terminal(examined, columns).split("\r\x1b[2K")
    assert drawn[-1].strip() == "1 fault found."
    shown = [line.rpartition("  ")[0] for line in drawn]
    assert {"stage 1/7  one process", "stage 7/7  checks, emulated GPUs"} <= set(shown)
    # The time goes on while a stage lasts.
    assert shown.count("stage 2/7  several ranks") > 2
    assert "\n" not in "".join(drawn[:-1])


@pytest.mark.parametrize("name", ["CI", "NO_COLOR"])
def test_a_terminal_without_escape_codes_has_a_line_per_stage(name: str) -> None:
    def work() -> int:
        os.environ[name] = "1"
        return examined()

    output = on_terminal(work, 60)
    assert "\x1b" not in output
    assert [line.rpartition("  ")[0] or line for line in output.splitlines()] == [
        "stage 1/7  one process",
        "stage 2/7  several ranks",
        "stage 7/7  checks, emulated GPUs",
        "1 fault found.",
    ]


def test_a_reader_that_has_gone_ends_nothing() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with shown_progress(stream) as shown:
        stream.write = lambda _: (_ for _ in ()).throw(OSError("gone"))  # type: ignore[method-assign]
        shown.begin("one process", 1, 3)


@pytest.mark.parametrize(
    ("numeric", "module", "first", "last"), [(True, True, 6, 6), (True, False, 6, 4), (False, True, 3, 3)]
)
def test_an_examination_names_its_stages(numeric: bool, module: bool, first: int, last: int, tmp_path: Path) -> None:
    end = event("end", reached_end=True, failures=[], libraries=[], module=module)
    ran = records([event("epoch", trains=False), end], [event("epoch", trains=False), end])
    seen: list[tuple[str, int, int]] = []
    evidence = Evidence(SPEC, Recorded(train1=ran[:1], train2=ran))
    examination = _Examination(evidence, {}, tmp_path, lambda *stage: seen.append(stage))
    examination.numeric = numeric
    examination._begin("one process", evidence)
    assert seen == [("one process", 1, first)]
    evidence.run("single", world_size=1)
    examination._begin("checks", evidence)
    assert seen[-1] == ("checks", last, last)
