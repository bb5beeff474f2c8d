"""What one rank alone knows, and all must act on at the same step: a signal has come, a checkpoint is due."""

from __future__ import annotations

import signal
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.signals import STOPPING
from lit_mnist.errors import InputError

_SECONDS_BETWEEN = 0.25


class Decision(NamedTuple):
    """What the ranks have agreed on: the signal to stop by, or None, and whether to save."""

    stop: signal.Signals | None = None
    save: bool = False


class Consensus:
    """Every so often the ranks tell each other what they know, by one all-reduce of a few numbers.

    It is done after as many steps as take about a quarter of a second, but at least one, by the slowest rank's figures:
    the ranks must agree on that number, too, and learn it from the agreement before.

    Args:
        rank: This rank.
        device: Its device.
        steps: A fixed number of steps between agreements, instead.
    """

    def __init__(self, rank: Rank, device: torch.device, steps: int | None = None) -> None:
        self.rank, self.device, self.fixed = rank, device, steps
        self._left = self._between = steps or 1
        self._since = time.monotonic()

    def step_done(self, step: int, received: signal.Signals | None, *, save: bool) -> Decision:
        """Counts a step, and agrees where it is time to; every rank must call it after every step."""
        self._left -= 1
        return self.settle(step, received, save=save) if self._left <= 0 else Decision()

    def settle(self, step: int, received: signal.Signals | None, *, save: bool = False) -> Decision:
        """Agrees now; every rank must call it.

        Args:
            step: Optimizer steps made.
            received: The signal that this rank has received, or None.
            save: Whether this rank wants a checkpoint.

        Raises:
            InputError: The ranks have not made the same number of steps; all raise it together.
        """
        now = time.monotonic()
        per_step = (now - self._since) / max(1, self._between - self._left)
        known = [per_step, float(step), float(-step), float(save), *(float(received == signum) for signum in STOPPING)]
        if self.rank.world_size > 1:
            shared = torch.tensor(known, dtype=torch.float64, device=self.device)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            known = shared.tolist()
        per_step, most, fewest, wanted, *signals = known
        if most != -fewest:
            raise InputError(
                f"One rank is at step {int(-fewest)}, and another at step {int(most)}: they went on from different "
                "checkpoints. The run folder must lie where all machines see the same files."
            )
        wished = int(_SECONDS_BETWEEN / max(per_step, 1e-9))
        # A few steps tell little of the next ones, which may be far slower.
        self._between = self.fixed or max(1, min(wished, 2 * self._between))
        self._left, self._since = self._between, time.monotonic()
        stop = next((signum for signum, came in zip(STOPPING, signals, strict=True) if came), None)
        return Decision(stop, bool(wanted))
