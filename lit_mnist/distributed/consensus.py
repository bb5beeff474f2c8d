"""The consensus of the ranks: all ranks react to a signal or a due checkpoint after the same step."""

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
    """What the ranks have decided: the signal that stops them, if any, and whether to save."""

    stop: signal.Signals | None = None
    save: bool = False


class Consensus:
    """Reaches a decision about every quarter of a second, with one all-reduce of a few numbers.

    The all-reduce also yields the time per step of the slowest rank. It determines the number of steps until the next
    decision, which is thus the same on all ranks.

    Args:
        rank: This rank.
        device: Its device.
        steps: A fixed number of steps between decisions.
    """

    def __init__(self, rank: Rank, device: torch.device, steps: int | None = None) -> None:
        self.rank, self.device, self.fixed = rank, device, steps
        self._left = self._between = steps or 1
        self._since = time.monotonic()

    def on_step_end(self, step: int, received: signal.Signals | None, *, save: bool) -> Decision:
        """Counts a step, and decides if a decision is due; every rank must call it after every step."""
        self._left -= 1
        return self.decide(step, received, save=save) if self._left <= 0 else Decision()

    def decide(self, step: int, received: signal.Signals | None, *, save: bool = False) -> Decision:
        """Decides now; every rank must call it.

        Args:
            step: Optimizer steps so far.
            received: The signal that this rank has received, or None.
            save: Whether this rank wants a checkpoint.

        Raises:
            InputError: The ranks are at different steps; all ranks raise it.
        """
        now = time.monotonic()
        per_step = (now - self._since) / max(1, self._between - self._left)
        values = [per_step, float(step), float(-step), float(save), *(float(received == signum) for signum in STOPPING)]
        if self.rank.world_size > 1:
            shared = torch.tensor(values, dtype=torch.float64, device=self.device)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            values = shared.tolist()
        per_step, most, fewest, wanted, *signals = values
        if most != -fewest:
            raise InputError(
                f"One rank is at step {int(-fewest)}, and another at step {int(most)}: they resumed from different "
                "checkpoints. The run folder must be on a file system that all machines share."
            )
        steps = int(_SECONDS_BETWEEN / max(per_step, 1e-9))
        # At most doubled: the next steps may be far slower than those that were measured.
        self._between = self.fixed or max(1, min(steps, 2 * self._between))
        self._left, self._since = self._between, time.monotonic()
        stop = next((signum for signum, came in zip(STOPPING, signals, strict=True) if came), None)
        return Decision(stop, bool(wanted))
