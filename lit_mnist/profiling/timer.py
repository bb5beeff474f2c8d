"""Divides the time of a thread among the parts of an optimizer step."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lit_mnist.profiling.timing import WARM_UP_STEPS

DATA, COPY, FORWARD, BACKWARD = "data", "copy to device", "forward", "backward"
BATCH_NORM, ALL_REDUCE = "batch norm's collectives", "all-reduce of the gradient"
OPTIMIZER, METRICS, LOGGING = "optimizer", "gradient check and metrics", "logging"
PROGRESS, KEEPING = "progress bar", "signal check and keeping"
PARTS = (DATA, COPY, FORWARD, BATCH_NORM, BACKWARD, ALL_REDUCE, METRICS, OPTIMIZER, LOGGING, PROGRESS, KEEPING)
# The remaining time: the engine's loop.
OUTSIDE = "outside"


class Timer:
    """Divides the time of the thread that creates it among nested parts. Calls from other threads are ignored.

    Attributes:
        running: The innermost part that runs.
        spent: Seconds of each part.
    """

    def __init__(self) -> None:
        self.running = OUTSIDE
        self.spent = dict.fromkeys((OUTSIDE, *PARTS), 0.0)
        self._outer: list[str] = []
        self._thread = threading.get_ident()
        self._since = time.perf_counter()

    def enter(self, part: str) -> None:
        """Starts a part within the running part."""
        if threading.get_ident() == self._thread:
            self._outer.append(self.running)
            self.switch(part)

    def leave(self) -> None:
        """Ends the running part, and continues the outer part."""
        if threading.get_ident() == self._thread:
            self.switch(self._outer.pop())

    def switch(self, part: str, at: float | None = None) -> None:
        """Replaces the running part by another part, from now on or from a time since the running part started."""
        now = time.perf_counter() if at is None else max(at, self._since)
        self.spent[self.running] += now - self._since
        self.running, self._since = part, now

    def restart(self) -> None:
        """Resets the times of all parts, which continue to run."""
        self.spent = dict.fromkeys(self.spent, 0.0)
        self._since = time.perf_counter()


class Step(NamedTuple):
    """The times of an optimizer step in seconds.

    Attributes:
        seconds: The duration of the step.
        own: The time that the stopwatch took.
        spent: The time of each part; None in a step without probes.
        counts: Whether the summary includes the step. It does not if the probes were changed before the step.
    """

    seconds: float
    own: float
    spent: dict[str, float] | None
    counts: bool


def summarize(steps: Sequence[Step]) -> dict[str, Any]:
    """Summarizes the steps after the warm-up in milliseconds. A time without any step is None.

    `step_ms` is the mean of the steps with probes, and the sum of `parts_ms`, `outside_ms` and `probe_ms`.
    `plain_step_ms` is the mean of the steps without probes, and `median_step_ms` is the median of all steps.
    """
    steps = steps[WARM_UP_STEPS:]
    watched = [(step, step.spent) for step in steps if step.counts and step.spent is not None]
    return {
        "warm_up_steps": WARM_UP_STEPS,
        "steps": len(watched),
        "step_ms": _mean_ms(step.seconds for step, _ in watched),
        "parts_ms": {part: _mean_ms(spent[part] for _, spent in watched) for part in PARTS},
        "outside_ms": _mean_ms(spent[OUTSIDE] for _, spent in watched),
        "probe_ms": _mean_ms(step.own for step, _ in watched),
        "plain_step_ms": _mean_ms(step.seconds for step in steps if step.counts and step.spent is None),
        "median_step_ms": 1000 * statistics.median(step.seconds for step in steps) if steps else None,
    }


def _mean_ms(seconds: Iterable[float]) -> float | None:
    values = list(seconds)
    return 1000 * statistics.fmean(values) if values else None
