"""Injected faults, which show how a run handles them: `--inject kill:rank=1,step=50`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from lit_mnist.distributed.rank import Rank


class InjectedError(Exception):
    """The error of `--inject raise`."""


class Fault:
    """A fault that happens in one step of one rank.

    At the start of the step, `kill` and `stop` send SIGKILL or SIGSTOP to this process, and `raise` raises an error.
    `nan` makes the next tensor NaN that is passed to `spoil`. A marker file in the run folder prevents the fault from
    happening again after a restart.

    Args:
        text: The fault as it was given, which the marker file holds; None for no fault.
        fault: Its kind, rank and step, counted from 1.
        rank: This rank.
        folder: The run folder.

    Attributes:
        is_nan: Whether it is `nan`.
    """

    def __init__(self, text: str | None, fault: tuple[str, int, int] | None, rank: Rank, folder: Path) -> None:
        self._text, self._marker = str(text), fault_marker(folder)
        self._kind, self._rank, self._step = fault or ("", rank.rank, 0)
        has_happened = self._marker.exists() and self._marker.read_text() == text
        if self._rank != rank.rank or has_happened:
            self._step = 0
        self.is_nan, self._is_due = self._kind == "nan", False

    def begin_step(self, step: int) -> None:
        """Fails if the fault is due in this step, counted from 1.

        Raises:
            InjectedError: The fault is `raise`.
        """
        if step != self._step:
            return
        self._step = 0
        # Without a run folder there is no restart.
        with suppress(FileNotFoundError):
            self._marker.write_text(self._text)
        if self._kind == "nan":
            self._is_due = True
        elif self._kind == "raise":
            raise InjectedError(f"--inject raise: rank {self._rank} fails in step {step}, as requested.")
        else:
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGSTOP)

    def spoil(self, values: torch.Tensor) -> torch.Tensor:
        """Returns NaN in place of the values if `nan` has begun, otherwise the values."""
        is_due, self._is_due = self._is_due, False
        return values * torch.nan if is_due else values

    def spoil_parameter(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes the first parameter NaN if `nan` has begun."""
        if self._is_due:
            with torch.no_grad():
                parameter = next(iter(parameters))
                parameter.copy_(self.spoil(parameter))


def fault_marker(folder: Path) -> Path:
    """Returns the path of the file that marks that the fault of a run has happened."""
    return folder / "logs" / "injected"
