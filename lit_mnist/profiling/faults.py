"""Injected faults, which show how a run handles them: `--inject kill:rank=1,step=50`."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_mnist.distributed.rank import Rank
from lit_mnist.training.job import Job


class InjectedError(Exception):
    """The error of `--inject raise`."""


def inject(job: Job, rank: Rank, net: nn.Module, step: int) -> None:
    """Installs the fault of a job on this rank, as a forward hook of the network that works in every engine.

    In the first micro-batch of the step, `kill` and `stop` send SIGKILL or SIGSTOP to this process, and `raise` raises
    an error. In all micro-batches of the step, `nan` replaces the outputs by NaN. A marker file in the run folder
    prevents the fault from happening again after a restart.

    Args:
        job: The job.
        rank: This rank.
        net: The bare network.
        step: Optimizer steps before the start.
    """
    fault = job.experiment.run.fault
    marker = fault_marker(job.folder)
    if fault is None or fault[1] != rank.rank or (marker.exists() and marker.read_text() == job.experiment.run.inject):
        return
    kind, _, fatal_step = fault
    plan = job.plan
    epoch, batch = plan.position(step)
    batches = epoch * plan.batches_per_epoch + batch
    first = (fatal_step - 1) // plan.steps_per_epoch * plan.batches_per_epoch
    first += (fatal_step - 1) % plan.steps_per_epoch * plan.accumulate
    fatal = range(first, first + plan.accumulation_window((fatal_step - 1) % plan.steps_per_epoch * plan.accumulate))

    def fail(_: nn.Module, arguments: Any, logits: torch.Tensor) -> torch.Tensor | None:
        nonlocal batches
        if not net.training:
            return None
        batches += 1
        if batches - 1 not in fatal:
            return None
        # Without a run folder there is no restart.
        with suppress(FileNotFoundError):
            marker.write_text(str(job.experiment.run.inject))
        if kind == "nan":
            return logits * torch.nan
        if kind == "raise":
            raise InjectedError(f"--inject raise: rank {rank.rank} fails in step {fatal_step}, as requested.")
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return None

    net.register_forward_hook(fail)


def fault_marker(folder: Path) -> Path:
    """Returns the path of the file that marks that the fault of a run has happened."""
    return folder / "logs" / "injected"
