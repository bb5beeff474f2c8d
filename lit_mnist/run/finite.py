"""Detects a loss or gradient that is infinite or NaN, at its step and on all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import get_total_norm

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.precision import needs_scaler
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import NonFiniteError
from lit_mnist.run.job import Job

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
        settle: Called with whether the gradient was finite, or None.
    """

    number: int
    largest: torch.Tensor
    losses: list[torch.Tensor]
    settle: Callable[[bool], None] | None


class FiniteCheck:
    """Checks the gradient of each step.

    If all ranks share the gradient, all of them detect a value that is not finite. Only then do they exchange their
    losses to find the failed rank. If the losses are finite, the GradScaler handles a gradient that overflows in
    float16. A gradient that is a rank's own is only checked by `check`, which all ranks call together.

    On a CPU, a step is checked before the optimizer uses the gradient. On a GPU, `check` checks all recorded steps: it
    is called with the logged metrics, and before anything is saved.

    Args:
        job: The job.
        rank: This rank.

    Attributes:
        checks_each_step: Whether each step is checked immediately.
        shared: Whether all ranks have the same gradient, as with DDP.
    """

    def __init__(self, job: Job, rank: Rank) -> None:
        self.job, self.rank, self.shared = job, rank, True
        self.device = job.devices.of(rank)
        self.scaled = needs_scaler(job.precision)
        self._losses: list[torch.Tensor] = []
        self._steps: list[_Step] = []
        self._skipped_in_a_row = self._last_skipped = 0
        self._scaler: GradScaler | None = None

    @property
    def checks_each_step(self) -> bool:
        """Whether each step is checked immediately."""
        return self.shared and self.device.type in SYNCHRONOUS_DEVICES

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
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            self.record(largest_value(gradients), step)
        self._losses = []
        if self.checks_each_step:
            self.check()

    def record(self, largest: torch.Tensor, step: int, settle: Callable[[bool], None] | None = None) -> None:
        """Records a step without waiting for the device.

        Args:
            largest: Largest absolute value of the unscaled gradient, a scalar that must not be modified later.
            step: The step, counted from 1.
            settle: Called by the next `check` with whether the gradient was finite.
        """
        losses, self._losses = self._losses, []
        self._steps.append(_Step(step, largest, losses, settle))

    def check(self) -> None:
        """Checks the steps that were recorded since the last check; every rank must call it.

        Raises:
            NonFiniteError: A gradient or loss is infinite or NaN, or the scaler has skipped 30 steps in a row, or its
                scale is below 1. All ranks raise it together, for the first such step.
        """
        steps, self._steps = self._steps, []
        largest = torch.stack([step.largest for step in steps]).tolist() if steps else []
        bad = [
            (step.number, [loss for loss in map(float, step.losses) if not math.isfinite(loss)])
            for step, value in zip(steps, largest, strict=True)
            if not math.isfinite(value)
        ]
        if self._any_rank(bool(bad)):
            self._find_cause(bad)
        for step, value in zip(steps, largest, strict=True):
            if step.settle:
                step.settle(math.isfinite(value))
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

    def _any_rank(self, found: bool) -> bool:
        """Returns whether any rank has found a value that is not finite, which all know if they share the gradient."""
        if self.shared or self.rank.world_size == 1:
            return found
        flag = torch.tensor(float(found), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

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

    def _find_cause(self, own: list[tuple[int, list[float]]]) -> None:
        """Finds the ranks whose losses are not finite; every rank must call it with its steps and such losses."""
        gathered = [dict(steps) for steps in all_gather_json(own)]
        for step in sorted({step for steps in gathered for step in steps}):
            failed = [number for number, steps in enumerate(gathered) if steps.get(step)]
            if failed:
                look, loss = self._log_samples(step, failed), gathered[failed[0]][step][0]
                raise NonFiniteError(f"The loss was {loss} in step {step} on {_name(failed)}: lower --lr, or {look}.")
            if not self.scaled:
                look = self._log_samples(step, range(self.rank.world_size))
                raise NonFiniteError(
                    f"The gradient was not finite in step {step}, though every rank's loss was: lower --lr, or {look}."
                )

    def _log(self) -> str:
        # The log of rank 0 exists with every launcher.
        return display_path(self.job.folder / "logs" / "rank-0.log")

    def _log_samples(self, step: int, ranks: Sequence[int]) -> str:
        """Logs the indices of the training samples of a step on some ranks, and returns how to find the cause."""
        numbers = self.job.samples_of(step, ranks)
        if numbers is None:
            return "find the operation with --trainer.detect_anomaly true"
        RANK_STATUS.log(f"The samples of step {step} on {_name(ranks)} are {', '.join(map(str, numbers))}.")
        return f"look at its samples, which {self._log()} lists"


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def largest_value(values: list[torch.Tensor]) -> torch.Tensor:
    """Returns the largest absolute value, a scalar. A sum of squares could overflow on its own."""
    if values[0].device.type in SYNCHRONOUS_DEVICES:
        # On a CPU, this takes half the time of a norm; on a GPU, a norm needs fewer kernels.
        return torch.stack([value.abs().max() for value in values]).max()
    return get_total_norm(values, math.inf)
