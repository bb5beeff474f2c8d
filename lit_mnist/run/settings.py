"""The section `run`: output, checkpoints, launching and tracing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require
from lit_mnist.run.bounds import check_bounds

# `train` fits, then tests the best weights exactly.
Command = Literal["train", "fit", "validate", "test", "predict"]
# A number of steps, or of seconds; neither is zero.
_PERIOD = r"[1-9]\d{0,8}|(?!0+\.?0*s)\d{1,9}(\.\d{1,3})?s"
_FAULT = r"(kill|raise|stop|nan):rank=(\d{1,6}),step=([1-9]\d{0,8})"


@dataclass(frozen=True)
class RunSettings:
    """Output, checkpoints, launching and tracing; only `threads` changes what is computed.

    Args:
        dir: The run folder; by default `runs/<time>-<name>`.
        resume: A run folder or checkpoint to resume from.
        save_every: Steps (`100`) or seconds (`30s`) between checkpoints within an epoch. Unset: at its end, and with
            the engine lightning every ten minutes.
        keep: Number of newest checkpoints to keep, beside the best.
        timeout: Seconds that a rank waits for the others before it fails.
        max_restarts: How often to restart the ranks after one is lost.
        inject: A fault to inject: `kill`, `raise`, `stop` or `nan`, as in `kill:rank=1,step=50`. A resumed or restarted
            run does not repeat it.
        threads: Threads of each rank; by default the cores divided by the ranks. It affects rounding.
        launcher: How ranks start: `agent` forks them from one process, `spawn` starts each as a new Python process.
        cuda_graph: Whether to run the steps as CUDA graphs. Unset: if it is supported, which is by the engines
            lightning and single, for the ConvNet, on one GPU.
        servers: Ranks that are also parameter servers, for the engine `parameter_server`.
        trace: What each rank records in `trace/`: `none`; `steps`: samples, loss and digests of the weights in each
            step; `traffic`: also the bytes sent in a few steps; `times`: the time of each part of a step.
        trace_step: The step after which the trace also records the weights themselves.
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
        check_bounds("run", self, "keep", "servers", "trace_step", low=1)
        check_bounds("run", self, "max_restarts", low=0)
        check_bounds("run", self, "threads", low=1, high=1024)
        require(0 < self.timeout < 1e6, f"run.timeout must be above 0 seconds, but is {self.timeout}.")
        require(
            self.inject is None or bool(re.fullmatch(_FAULT, self.inject)),
            f"run.inject must be kill, raise, stop or nan with a rank and a step, such as kill:rank=1,step=50, but is "
            f"{self.inject}.",
        )
        require(
            self.trace_step is None or self.trace in {"steps", "traffic"},
            "run.trace_step requires a trace of the weights: set run.trace to steps or traffic.",
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
