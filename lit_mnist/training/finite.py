"""Notices a loss or a gradient that is infinite or not a number, at its step and on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm

from lit_mnist.data.sampler import train_indices
from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import NonFiniteError
from lit_mnist.training.job import Job
from lit_mnist.training.precision import needs_scaler

# Where a number costs nothing to read. On another device the host would wait for all that it has queued there.
AT_ONCE = frozenset({"cpu"})
# A scaler that skips so many steps in a row, or whose scale is below this, does not find one that suits the gradient.
_MOST_SKIPPED, _LEAST_SCALE = 30, 1.0


class _Step(NamedTuple):
    """What is kept of a step until it is looked at: numbers on the device, none of them read.

    Attributes:
        number: The step, counted from 1.
        largest: The gradient's largest absolute value, a scalar, not finite where any value is not.
        losses: This rank's mean loss of each of its micro-batches, scalars.
    """

    number: int
    largest: torch.Tensor
    losses: list[torch.Tensor]


class FiniteCheck:
    """Looks at each step's gradient, which all ranks share: what is not finite on one is seen by all, at once.

    Only then do the ranks ask each other whose loss it was. A gradient that overflows in float16 is the GradScaler's
    affair, as long as the loss is finite.

    On a CPU it looks before the optimizer makes the step. On a GPU the steps are kept, and looked at together where
    `check` is called: with the logged metrics, and before anything is saved.

    Args:
        job: The job.
        rank: This rank.

    Attributes:
        at_once: Whether it looks at each step by itself.
    """

    def __init__(self, job: Job, rank: Rank) -> None:
        self.job, self.rank = job, rank
        self.scaled = needs_scaler(job.precision)
        self.at_once = job.devices.of(rank).type in AT_ONCE
        self._losses: list[torch.Tensor] = []
        self._steps: list[_Step] = []
        self._skipped_in_a_row = self._last_skipped = 0
        self._scaler: GradScaler | None = None

    def on_batch_end(self, loss: torch.Tensor) -> None:
        """Notes a micro-batch's mean loss on this rank."""
        self._losses.append(loss)

    def forget(self) -> None:
        """Drops the losses of a step whose gradient is not looked at."""
        self._losses = []

    def on_before_optimizer_step(self, parameters: list[nn.Parameter], step: int) -> None:
        """Notes the gradient of a step before the optimizer makes it, and may look; every rank must call it.

        Args:
            parameters: The network's, with the gradient of all ranks, unscaled.
            step: The step, counted from 1.

        Raises:
            NonFiniteError: As of `check`.
        """
        losses, self._losses = self._losses, []
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._steps.append(_Step(step, _largest(gradients), losses))
        if self.at_once:
            self.check()

    def check(self) -> None:
        """Looks at the steps that were noted since the last look; every rank must call it.

        Raises:
            NonFiniteError: A gradient, or the loss, is infinite or not a number; all ranks raise it together, for the
                first such step. Or the scaler has skipped 30 steps in a row, or its scale is below 1.
        """
        steps, self._steps = self._steps, []
        largest = torch.stack([step.largest for step in steps]).tolist() if steps else []
        for step, value in zip(steps, largest, strict=True):
            if not math.isfinite(value):
                self._find_cause(step.number, [loss for loss in map(float, step.losses) if not math.isfinite(loss)])
        scaler, self._scaler = self._scaler, None
        if scaler:
            self._check_scale(scaler)

    def on_step_skipped(self, step: int, scaler: GradScaler) -> None:
        """Notes a step that the scaler has left out, and may look; every rank must call it.

        Args:
            step: The step, counted from 1.
            scaler: The scaler, already updated.

        Raises:
            NonFiniteError: As of `check`.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if step == self._last_skipped + 1 else 1
        self._last_skipped, self._scaler = step, scaler
        if self.at_once or self._skipped_in_a_row >= _MOST_SKIPPED:
            self.check()

    def _check_scale(self, scaler: GradScaler) -> None:
        """Ends a training in float16 whose gradient is never finite: no step would be made until its end.

        All ranks do at the same step: they share the gradient, and so the scaler's state.
        """
        scale, row = scaler.get_scale(), self._skipped_in_a_row
        if row < _MOST_SKIPPED and scale >= _LEAST_SCALE:
            return
        step = self._last_skipped
        steps = f"the last {row} steps, up to step {step}" if row > 1 else f"step {step}"
        raise NonFiniteError(
            f"The gradient was not finite in float16 in {steps}, and the scale of the loss has fallen to {scale:g}: "
            "lower --lr, or use --precision bf16-mixed or 32-true."
        )

    def _find_cause(self, step: int, bad: list[float]) -> None:
        """Finds out whose loss it was; every rank must call it, with its own losses that are not finite."""
        gathered: list[list[float]] = all_gather_json(bad)
        failed = [number for number, losses in enumerate(gathered) if losses]
        if failed:
            self._log_samples(step, failed)
            raise NonFiniteError(
                f"The loss was {gathered[failed[0]][0]} in step {step} on {_named(failed)}: lower --lr, or look at its "
                f"samples, which {self._log()} lists."
            )
        if not self.scaled:
            self._log_samples(step, range(self.rank.world_size))
            raise NonFiniteError(
                f"The gradient was not finite in step {step}, though every rank's loss was: lower --lr, or look at its "
                f"samples, which {self._log()} lists."
            )

    def _log(self) -> str:
        """Returns the log of rank 0, which is there however the ranks were started."""
        return display_path(self.job.folder / "logs" / "rank-0.log")

    def _log_samples(self, step: int, ranks: Sequence[int]) -> None:
        """Writes the training samples of a step on some ranks into this rank's log, by their numbers."""
        plan = self.job.plan
        epoch, first = plan.position(step - 1)
        share = plan.batch_size // plan.world_size
        numbers: list[int] = []
        for batch in range(first, first + plan.accumulation_window(first)):
            whole = train_indices(
                self.job.experiment.seed_everything,
                plan.order_of(epoch),
                batch,
                count=len(self.job.splits.train),
                batch_size=plan.batch_size,
            )
            for rank in ranks:
                numbers += whole[rank * share : (rank + 1) * share].tolist()
        RANK_STATUS.log(f"The samples of step {step} on {_named(ranks)} are {', '.join(map(str, numbers))}.")


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _largest(values: list[torch.Tensor]) -> torch.Tensor:
    """Returns the largest absolute value, a scalar: not the sum of squares, which may overflow alone."""
    if values[0].device.type in AT_ONCE:
        # A norm takes a CPU twice as long, a GPU a few kernels for all values.
        return torch.stack([value.abs().max() for value in values]).max()
    return get_total_norm(values, math.inf)
