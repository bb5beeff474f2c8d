"""Helpers of the fault tests: the progress of running commands, and the measurements that the tests print."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Program
from processes import processes_of, wait_for

from lit_mnist.distributed.rank_status import LAUNCHER_FOLDER, STATUS_FILE, StatusFile

# 20 steps per epoch with up to four ranks, and a validation at the end of each epoch.
SMALL: tuple[object, ...] = (
    *("--data.train_size", 720, "--data.val_size", 100, "--data.test_size", 100),
    *("--batch-size", 36, "--lr", 0.05, "--run.threads", 1),
)

RecordMetric = Callable[[str, str], None]


def write_metric(row: str, value: str) -> None:
    """Prints a measurement, and appends it to the file in FAULT_METRICS for docs/reliability.md."""
    print(f"\n{row}: {value}")
    if path := os.environ.get("FAULT_METRICS"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"row": row, "value": value}) + "\n")


@pytest.fixture
def record_metric() -> RecordMetric:
    """Returns the function that prints a measurement of a test."""
    return write_metric


def read_step(folder: Path, rank: int = 0) -> int:
    """Returns the current step of a rank (from 1) from the launcher's status file, or 0 before the training."""
    for path in (folder / "logs").glob(f"{LAUNCHER_FOLDER}*/{STATUS_FILE}"):
        with suppress(FileNotFoundError):
            file = StatusFile(path)
            step, _ = file.read(rank)
            file.close()
            return step
    return 0


def wait_for_exit(group: int, program: Program, timeout: float) -> tuple[int, float]:
    """Waits until a command and all its processes have ended, and returns its exit code and the seconds."""
    began = time.monotonic()
    _, status = wait_for(lambda: (found := os.waitpid(group, os.WNOHANG))[0] and found, timeout, program.folder)
    wait_for(lambda: not processes_of(group), max(0.1, timeout - (time.monotonic() - began)), program.folder)
    return os.waitstatus_to_exitcode(status), time.monotonic() - began


def read_errors(program: Program) -> str:
    """Returns the standard error of a command."""
    return (program.folder / "stderr.txt").read_text()
