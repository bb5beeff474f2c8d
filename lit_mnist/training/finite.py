"""Detects a loss or gradient that is infinite or NaN, at its step and on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.precision import needs_scaler
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.sample_order import train_indices
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import NonFiniteError
from lit_mnist.training.job import Job

# Devices whose values can be read in each step: on other devices, the host would wait for all queued kernels.
SYNCHRONOUS_DEVICES = frozenset({"cpu"})
# A scaler that skips this many steps in a row, or whose scale is lower than this, does not recover.
_MOST_SKIPPED, _LEAST_SCALE = 30, 1.0


class _Step(NamedTuple):
    """A step that is not yet checked.

    Attributes:
        number: The step, counted from 1.
        largest: Largest absolute value of the gradient, a scalar; not finite if any value is not finite.
        losses: Mean loss of each micro-batch on this rank, scalars.
    """

    number: int
    largest: torch.Tensor
    losses: list[torch.Tensor]


class FiniteCheck:
    """Checks the gradient of each step.

    All ranks share the gradient, so all of them detect a value that is not finite. Only then do they exchange their
    losses to find the failed rank. If the losses are finite, the GradScaler handles a gradient that overflows in
    float16.

    On a CPU, a step is checked before the optimizer uses the gradient. On a GPU, `check` checks all recorded steps: it
    is called with the logged metrics, and before anything is saved.

    Args:
        job: The job.
        rank: This rank.

    Attributes:
        checks_each_step: Whether each step is checked immediately.
    """

    def __init__(self, job: Job, rank: Rank) -> None:
        self.job, self.rank = job, rank
        self.scaled = needs_scaler(job.precision)
        self.checks_each_step = job.devices.of(rank).type in SYNCHRONOUS_DEVICES
        self._losses: list[torch.Tensor] = []
        self._steps: list[_Step] = []
        self._skipped_in_a_row = self._last_skipped = 0
        self._scaler: GradScaler | None = None

    def on_batch_end(self, loss: torch.Tensor) -> None:
        """Records the mean loss of a micro-batch on this rank."""
        self._losses.append(loss)

    def forget(self) -> None:
        """Drops the losses of a step whose gradient was not recorded."""
        self._losses = []

    def on_before_optimizer_step(self, parameters: list[nn.Parameter], step: int) -> None:
        """Records the gradient of a step before the optimizer uses it; every rank must call it.

        Args:
            parameters: The parameters, with the unscaled gradient of all ranks.
            step: The step, counted from 1.

        Raises:
            NonFiniteError: As for `check`.
        """
        losses, self._losses = self._losses, []
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._steps.append(_Step(step, _largest(gradients), losses))
        if self.checks_each_step:
            self.check()

    def check(self) -> None:
        """Checks the steps that were recorded since the last check; every rank must call it.

        Raises:
            NonFiniteError: A gradient or loss is infinite or NaN, or the scaler has skipped 30 steps in a row, or its
                scale is below 1. All ranks raise it together, for the first such step.
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
        """Records a step that the scaler skipped; every rank must call it.

        Args:
            step: The step, counted from 1.
            scaler: The scaler, after its update.

        Raises:
            NonFiniteError: As for `check`.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if step == self._last_skipped + 1 else 1
        self._last_skipped, self._scaler = step, scaler
        if self.checks_each_step or self._skipped_in_a_row >= _MOST_SKIPPED:
            self.check()

    def _check_scale(self, scaler: GradScaler) -> None:
        # All ranks raise at the same step: they share the gradient, and therefore the state of the scaler.
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
        """Finds the ranks whose losses are not finite; every rank must call it with its own such losses."""
        gathered: list[list[float]] = all_gather_json(bad)
        failed = [number for number, losses in enumerate(gathered) if losses]
        if failed:
            self._log_samples(step, failed)
            raise NonFiniteError(
                f"The loss was {gathered[failed[0]][0]} in step {step} on {_name(failed)}: lower --lr, or look at its "
                f"samples, which {self._log()} lists."
            )
        if not self.scaled:
            self._log_samples(step, range(self.rank.world_size))
            raise NonFiniteError(
                f"The gradient was not finite in step {step}, though every rank's loss was: lower --lr, or look at its "
                f"samples, which {self._log()} lists."
            )

    def _log(self) -> str:
        # The log of rank 0 exists with every launcher.
        return display_path(self.job.folder / "logs" / "rank-0.log")

    def _log_samples(self, step: int, ranks: Sequence[int]) -> None:
        """Logs the indices of the training samples of a step on some ranks."""
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
        RANK_STATUS.log(f"The samples of step {step} on {_name(ranks)} are {', '.join(map(str, numbers))}.")


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _largest(values: list[torch.Tensor]) -> torch.Tensor:
    """Returns the largest absolute value, a scalar. A sum of squares could overflow on its own."""
    if values[0].device.type in SYNCHRONOUS_DEVICES:
        # On a CPU, this takes half the time of a norm; on a GPU, a norm needs fewer kernels.
        return torch.stack([value.abs().max() for value in values]).max()
    return get_total_norm(values, math.inf)
