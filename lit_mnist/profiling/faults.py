"""Faults on purpose, for seeing what becomes of them: `--inject kill:rank=1,step=50`."""

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
    """What `--inject raise` raises."""


def inject(job: Job, rank: Rank, net: nn.Module, step: int) -> None:
    """Prepares the fault that a job asks for, if it is this rank's.

    It comes from within the network, so that no engine's loop has to know of it, in the forward pass of its step's
    first micro-batch: `kill` and `stop` send this process SIGKILL or SIGSTOP, `raise` raises, and `nan` makes the
    outputs of all the step's micro-batches no number. A note in the run folder keeps it from coming again after a
    restart.

    Args:
        job: The job.
        rank: This rank.
        net: The bare network.
        step: Optimizer steps made before.
    """
    fault = job.experiment.run.fault
    note = injected(job.folder)
    if fault is None or fault[1] != rank.rank or (note.exists() and note.read_text() == job.experiment.run.inject):
        return
    kind, _, fatal_step = fault
    plan = job.plan
    epoch, batch = plan.position(step)
    batches = epoch * plan.batches_per_epoch + batch
    first = (fatal_step - 1) // plan.steps_per_epoch * plan.batches_per_epoch
    first += (fatal_step - 1) % plan.steps_per_epoch * plan.accumulate
    fatal = range(first, first + plan.window((fatal_step - 1) % plan.steps_per_epoch * plan.accumulate))

    def fail(_: nn.Module, arguments: Any, logits: torch.Tensor) -> torch.Tensor | None:
        nonlocal batches
        if not net.training:
            return None
        batches += 1
        if batches - 1 not in fatal:
            return None
        # Without a folder that all ranks know, there is no restart either.
        with suppress(FileNotFoundError):
            note.write_text(str(job.experiment.run.inject))
        if kind == "nan":
            return logits * torch.nan
        if kind == "raise":
            raise InjectedError(f"--inject raise: rank {rank.rank} fails in step {fatal_step}, as it was asked to.")
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return None

    net.register_forward_hook(fail)


def injected(folder: Path) -> Path:
    """Returns the note that a run's fault has come."""
    return folder / "logs" / "injected"
