"""Accounts the time of a thread to the parts of an optimizer step."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lit_mnist.run.timing import WARM_UP_STEPS

DATA, COPY, FORWARD, BACKWARD = "data", "copy to device", "forward", "backward"
BATCH_NORM, ALL_REDUCE = "batch norm's collectives", "all-reduce of the gradient"
OPTIMIZER, METRICS, LOGGING = "optimizer", "gradient check and metrics", "logging"
PROGRESS, KEEPING = "progress bar", "signal check and keeping"
PARTS = (DATA, COPY, FORWARD, BATCH_NORM, BACKWARD, ALL_REDUCE, METRICS, OPTIMIZER, LOGGING, PROGRESS, KEEPING)
# What no probe sees.
OUTSIDE = "outside"


class Timer:
    """Accounts the time of the thread that makes it, each moment to the innermost part that runs.

    What other threads tell is left aside.

    Attributes:
        running: The part that runs now.
        spent: Seconds of each part.
    """

    def __init__(self) -> None:
        self.running = OUTSIDE
        self.spent = dict.fromkeys((OUTSIDE, *PARTS), 0.0)
        self._around: list[str] = []
        self._thread = threading.get_ident()
        self._since = time.perf_counter()

    def enter(self, part: str) -> None:
        """Begins a part within the one that runs."""
        if threading.get_ident() == self._thread:
            self._around.append(self.running)
            self.switch(part)

    def leave(self) -> None:
        """Ends the part that runs, and goes on with the one around it."""
        if threading.get_ident() == self._thread:
            self.switch(self._around.pop())

    def switch(self, part: str, at: float | None = None) -> None:
        """Lets another part run in place of this one, from now on, or from a moment since this one began to run."""
        now = time.perf_counter() if at is None else max(at, self._since)
        self.spent[self.running] += now - self._since
        self.running, self._since = part, now

    def restart(self) -> None:
        """Forgets what was spent; the parts that run go on."""
        self.spent = dict.fromkeys(self.spent, 0.0)
        self._since = time.perf_counter()


class Step(NamedTuple):
    """An optimizer step.

    Attributes:
        seconds: How long it took.
        own: Seconds of it that were spent on keeping the time.
        spent: Seconds of each part, in a step that was watched, and else None.
        counts: Whether it is one to be told of: not where the watching has just begun or ended.
    """

    seconds: float
    own: float
    spent: dict[str, float] | None
    counts: bool


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Returns what the steps after the warm-up took, in milliseconds; None where there was none.

    `step_ms` is the mean of the watched steps, which `parts_ms`, `outside_ms` and `own_ms` add up to; `plain_step_ms`
    is that of the others, and `median_step_ms` the median of all.
    """
    steps = steps[WARM_UP_STEPS:]
    watched = [(step, step.spent) for step in steps if step.counts and step.spent is not None]
    return {
        "warm_up_steps": WARM_UP_STEPS,
        "steps": len(watched),
        "step_ms": _mean_ms(step.seconds for step, _ in watched),
        "parts_ms": {part: _mean_ms(spent[part] for _, spent in watched) for part in PARTS},
        "outside_ms": _mean_ms(spent[OUTSIDE] for _, spent in watched),
        "own_ms": _mean_ms(step.own for step, _ in watched),
        "plain_step_ms": _mean_ms(step.seconds for step in steps if step.counts and step.spent is None),
        "median_step_ms": 1000 * statistics.median(step.seconds for step in steps) if steps else None,
    }


def _mean_ms(seconds: Iterable[float]) -> float | None:
    values = list(seconds)
    return 1000 * statistics.fmean(values) if values else None
