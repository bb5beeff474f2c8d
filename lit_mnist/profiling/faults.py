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

    At the start of the step, `kill` and `stop` send SIGKILL or SIGSTOP to this process, `raise` raises an error, and
    `nan` replaces a parameter by NaN. A marker file in the run folder prevents the fault from happening again after a
    restart.

    Args:
        text: The fault as it was given, which the marker file holds; None for no fault.
        fault: Its kind, rank and step, counted from 1.
        rank: This rank.
        folder: The run folder.
        parameters: The parameters of the network.
    """

    def __init__(
        self,
        text: str | None,
        fault: tuple[str, int, int] | None,
        rank: Rank,
        folder: Path,
        parameters: Iterable[nn.Parameter],
    ) -> None:
        self._text, self._marker = str(text), fault_marker(folder)
        self._kind, self._rank, self._step = fault or ("", rank.rank, 0)
        has_happened = self._marker.exists() and self._marker.read_text() == text
        if self._rank != rank.rank or has_happened:
            self._step = 0
        self._parameters = list(parameters)

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
            with torch.no_grad():
                self._parameters[0].fill_(torch.nan)
        elif self._kind == "raise":
            raise InjectedError(f"--inject raise: rank {self._rank} fails in step {step}, as requested.")
        else:
            os.kill(os.getpid(), signal.SIGKILL if self._kind == "kill" else signal.SIGSTOP)


def fault_marker(folder: Path) -> Path:
    """Returns the path of the file that marks that the fault of a run has happened."""
    return folder / "logs" / "injected"
