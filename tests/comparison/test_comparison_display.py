"""The progress of a comparison: one line on a terminal, which is removed at the end, and a line per run elsewhere."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from conftest import Program
from faults.conftest import wait_for_exit
from faults.terminal import in_terminal

from lit_mnist.comparison import progress
from lit_mnist.comparison.progress import ComparisonDisplay
from lit_mnist.comparison.runs import Variant


def engine(words: list[str], name: str) -> int:
    print(f"{name} trains")
    time.sleep(1)
    return 0


def compared() -> int:
    """Runs two engines as a comparison does, and then prints a table."""
    progress._SECONDS_BETWEEN_DRAWINGS = 0.05  # type: ignore[misc]
    display = ComparisonDisplay()
    for number, name in enumerate(("single", "raw_ddp"), start=1):
        display.begin(f"engine {number}/2  {name}  training with a trace")
        assert Variant(name).run([], 1, Path(f"{name}.log"), display, main=engine) == 0
        # The next fork copies no thread that holds a lock.
        assert threading.active_count() == 1
    display.clear()
    print("The engines are equal.", flush=True)
    return 0


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_a_terminal_has_one_line_that_is_removed(columns: int, tmp_path: Path) -> None:
    def work() -> int:
        os.chdir(tmp_path)
        return compared()

    with in_terminal(work, tmp_path, columns) as terminal:
        assert wait_for_exit(terminal.group, Program(tmp_path), 60)[0] == 0, terminal.output
    drawn = terminal.output.split("\r\x1b[2K")
    assert [line.rpartition("  ")[0] for line in drawn].count("engine 2/2  raw_ddp  training with a trace") > 2, drawn
    assert "\n" not in "".join(drawn[:-1])
    assert terminal.screen()[:1] == ["The engines are equal."]
    # What an engine prints is in its log, as before.
    assert (tmp_path / "raw_ddp.log").read_text() == "raw_ddp trains\n"


@pytest.mark.parametrize("name", ["CI", "NO_COLOR"])
def test_a_terminal_without_escape_codes_has_a_line_per_run(name: str, tmp_path: Path) -> None:
    def work() -> int:
        os.chdir(tmp_path)
        os.environ[name] = "1"
        return compared()

    with in_terminal(work, tmp_path, 60) as terminal:
        assert wait_for_exit(terminal.group, Program(tmp_path), 60)[0] == 0, terminal.output
    assert "\x1b" not in terminal.output
    assert [line.rpartition("  ")[0] or line for line in terminal.output.splitlines()] == [
        "engine 1/2  single  training with a trace",
        "engine 2/2  raw_ddp  training with a trace",
        "The engines are equal.",
    ]
