"""Measurements of a run: times, memory, versions."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

WARM_UP_STEPS = 20
# A measurement takes up to 30 ms, as the system visits every page of the process.
_SECONDS_BETWEEN_MEMORY = 5.0
_PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "jsonargparse", "numpy", "accelerate", "transformers")


def seconds_since_start(pid: int) -> float | None:
    """Returns the seconds since a process started, or None if the system does not report them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def unshared_memory(pid: int) -> int:
    """Returns the unshared memory (USS) of a process in bytes, or 0 if the system does not report it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Returns the median and the extremes of measurements, or None if there are none."""
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return {"median": statistics.median(measured), "lowest": min(measured), "highest": max(measured)}


class StepClock:
    """Times the optimizer steps of a run on one rank.

    Args:
        first_process: ID of the process whose start is the start of the run.
    """

    def __init__(self, first_process: int) -> None:
        self.first_process = first_process
        self.seconds_to_first_step: float | None = None
        self.peak_memory = 0
        self._durations: list[float] = []
        self._started = self._measured = time.perf_counter()
        self._last: float | None = None
        self._queued = 0

    def on_step_end(self, *, waited: bool = True) -> None:
        """Records the end of an optimizer step.

        Args:
            waited: Whether the device has finished the step. Its time is divided evenly among the step and the queued
                steps before it.
        """
        self._queued += 1
        if not waited:
            return
        now, steps, self._queued = time.perf_counter(), self._queued, 0
        if self._last is not None:
            self._durations += [(now - self._last) / steps] * steps
        elif self.seconds_to_first_step is None:
            self.seconds_to_first_step = seconds_since_start(self.first_process)
        self._last = now

    def pause(self) -> None:
        """Excludes the time until the next step, such as a validation or a save."""
        self._last, self._queued = None, 0
        if time.perf_counter() - self._measured > _SECONDS_BETWEEN_MEMORY:
            self.update_peak_memory()

    def update_peak_memory(self) -> None:
        """Updates the peak memory of this process."""
        self.peak_memory = max(self.peak_memory, unshared_memory(os.getpid()))
        self._measured = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the training began."""
        return time.perf_counter() - self._started

    def recent_steps_per_s(self, steps: int = 50) -> float | None:
        """Returns the steps per second over the last steps."""
        recent = self._durations[-steps:]
        return len(recent) / sum(recent) if recent else None

    def steps_per_s(self) -> float | None:
        """Returns the steps per second of the median step after the warm-up, or None without such a step."""
        measured = self._durations[WARM_UP_STEPS:]
        return 1 / statistics.median(measured) if measured else None


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that affect the result."""
    found = {"lit_mnist": "unknown", "python": platform.python_version()}
    for package in ("lit_mnist", *_PACKAGES):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@cache
def commit() -> str | None:
    """Returns the commit of the source, with `-dirty` for local changes, or None outside a repository."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
