"""The section `run`: where a run writes and how it is watched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require

# A number of steps, or of seconds; neither is zero.
_PERIOD = r"[1-9]\d{0,8}|(?!0+\.?0*s)\d{1,9}(\.\d{1,3})?s"
_FAULT = r"(kill|raise|stop|nan):rank=(\d{1,6}),step=([1-9]\d{0,8})"


@dataclass(frozen=True)
class RunSettings:
    """Where a run writes and how it is watched; nothing here changes what is computed, except `threads`.

    Args:
        dir: The run folder; by default `runs/<time>-<name>`.
        resume: A run folder or checkpoint to resume from.
        save_every: Steps (`100`) or seconds (`30s`) between checkpoints within an epoch; unset: at epochs' ends only.
        keep: Newest checkpoints to keep, beside the best.
        timeout: Seconds that a rank waits for the others before it gives up.
        max_restarts: How often lost ranks are started again.
        inject: A fault to see what happens: `kill`, `raise`, `stop` or `nan`, as in `kill:rank=1,step=50`. A resumed or
            restarted run does not repeat it.
        threads: Threads of each rank; by default the cores divided by the ranks. It affects the result's bits.
        launcher: `agent`: the ranks of this machine are forked; `spawn`: each is a new Python process.
        cuda_graph: Whether a GPU is given the passes of a micro-batch as one recorded graph; unset: where that is
            offered, which is by the engines lightning and single, for the ConvNet, on one GPU.
        servers: Ranks that also are parameter servers, for the engine `parameter_server`.
        trace: What each rank writes down in `trace/`: `none`; `steps`: what it trains on and what comes out, step by
            step; `traffic`: also what it sends, over a few steps; `times`: how long each part of a step takes.
        trace_step: A step after which the trace keeps whole weights, and not only their digests.
    """

    dir: str | None = None
    resume: str | None = None
    save_every: int | str | None = None
    keep: int = 2
    timeout: float = 120.0
    max_restarts: int = 0
    inject: str | None = None
    threads: int | None = None
    launcher: Literal["agent", "spawn"] = "agent"
    cuda_graph: bool | None = None
    servers: int = 1
    trace: Literal["none", "steps", "traffic", "times"] = "none"
    trace_step: int | None = None

    def __post_init__(self) -> None:
        require(
            self.save_every is None or bool(re.fullmatch(_PERIOD, str(self.save_every))),
            f"run.save_every must be steps, such as 100, or seconds, such as 30s, but is {self.save_every}.",
        )
        require(self.keep >= 1, f"run.keep must be at least 1 checkpoint, but is {self.keep}.")
        require(
            self.inject is None or bool(re.fullmatch(_FAULT, self.inject)),
            f"run.inject must be kill, raise, stop or nan with a rank and a step, such as kill:rank=1,step=50, but is "
            f"{self.inject}.",
        )
        require(
            self.trace_step is None or self.trace in {"steps", "traffic"},
            "run.trace_step needs a trace of the weights: set run.trace to steps or traffic, too.",
        )
        require(
            self.trace_step is None or self.trace_step >= 1,
            f"run.trace_step must be at least 1, but is {self.trace_step}.",
        )
        require(self.servers >= 1, f"run.servers must be at least 1, but is {self.servers}.")
        require(0 < self.timeout < 1e6, f"run.timeout must be above 0 seconds, but is {self.timeout}.")
        require(self.max_restarts >= 0, f"run.max_restarts must be at least 0, but is {self.max_restarts}.")
        require(
            self.threads is None or 1 <= self.threads <= 1024,
            f"run.threads must be from 1 to 1024, or unset, but is {self.threads}.",
        )

    @property
    def save_steps(self) -> int | None:
        """Steps between checkpoints, if `save_every` is in steps."""
        return None if self.save_every is None or str(self.save_every).endswith("s") else int(self.save_every)

    @property
    def save_seconds(self) -> float | None:
        """Seconds between checkpoints, if `save_every` is in seconds."""
        text = str(self.save_every)
        return float(text[:-1]) if self.save_every is not None and text.endswith("s") else None

    @property
    def fault(self) -> tuple[str, int, int] | None:
        """The kind, rank and step of the fault to inject, or None."""
        found = re.fullmatch(_FAULT, self.inject or "")
        return (found[1], int(found[2]), int(found[3])) if found else None
