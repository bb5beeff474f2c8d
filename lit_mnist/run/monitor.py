"""Monitors the steps of a training run on one rank, in every engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.distributed.heartbeat import Heartbeat
from lit_mnist.distributed.precision import autocast_dtype, weight_dtype
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.profiling.faults import Fault
from lit_mnist.profiling.timing import StepClock
from lit_mnist.profiling.trace import Trace
from lit_mnist.run.finite import FiniteCheck
from lit_mnist.run.job import Job
from lit_mnist.run.outcome import Trained
from lit_mnist.run.progress import ProgressDisplay

if TYPE_CHECKING:
    from lit_mnist.profiling.stopwatch import Stopwatch


class StepMonitor:
    """Monitors the steps of a training run on one rank: timing, finite losses, heartbeat, traces and injected faults.

    Args:
        job: The job.
        rank: This rank.
        clock: Times the steps.
        net: The network. Its forward pass begins a micro-batch, unless `forward` is False.
        step: Optimizer steps before the run was resumed.
        epoch_steps: Optimizer steps of the first epoch, of which the traffic of a step may be counted; None if unknown.
        forward: Whether the network's forward pass begins a micro-batch; otherwise, `on_batch_start` is called.

    Attributes:
        step: Optimizer steps so far.
        fault: The fault to inject. `nan` makes the output of the forward pass NaN, or what a caller passes to it.
        train_loss: The last logged training loss.
        logged: Metrics over all ranks that were logged in the last step; empty if it was not logged.
        epoch_line: Summary of the last epoch.
        display: The progress display on rank 0, None on the other ranks.
    """

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        clock: StepClock,
        net: nn.Module,
        step: int = 0,
        epoch_steps: int | None = None,
        forward: bool = True,
    ) -> None:
        self.rank, self.clock, self.net = rank, clock, net
        self.step = self.first_step = step
        self.train_loss: float | None = None
        self.logged: dict[str, float] = {}
        self.epoch_line = ""
        self.display: ProgressDisplay | None = None
        self.finite = FiniteCheck(job, rank)
        run = job.run
        self.fault = Fault(run.inject, run.fault, rank, job.folder)
        self.heartbeat = Heartbeat(rank, step) if rank.world_size > 1 else None
        self._hooks = [net.register_forward_pre_hook(self._on_forward)] if forward else []
        if forward and self.fault.is_nan:
            spoil = self.fault.spoil
            self._hooks.append(net.register_forward_hook(lambda net, _, out: spoil(out) if net.training else out))
        RANK_STATUS.begin_step(step + 1)
        self.trace: Trace | None = None
        self.stopwatch: Stopwatch | None = None
        if run.trace == "times":
            self.stopwatch = self._start_stopwatch(job)
        elif run.trace != "none":
            dtype = autocast_dtype(job.precision) or weight_dtype(job.precision)
            # The last step of an epoch is not counted: the collectives of the validation follow it.
            counted = epoch_steps - 1 if run.trace == "traffic" and epoch_steps else 0
            self.trace = Trace(
                net, job.folder, rank, dtype=dtype, forward=forward, last_counted=counted, keep=run.trace_step
            )

    def timed_loaders(self) -> list[type]:
        """Returns the classes of the train loaders, for `--run.trace times`."""
        return []

    def timed_calls(self) -> list[tuple[Any, str, str]]:
        """Returns functions that `--run.trace times` times: an object or class, the function's name, and the part."""
        return []

    def _start_stopwatch(self, job: Job) -> Stopwatch:
        from lit_mnist.profiling.stopwatch import Stopwatch

        stopwatch = Stopwatch(self, job.folder, self.timed_loaders(), self.timed_calls())
        stopwatch.start()
        return stopwatch

    def _on_forward(self, net: nn.Module, _: Any) -> None:
        if net.training:
            self._begin_batch()

    def on_batch_start(self, batch: Any) -> None:
        """Records the start of a micro-batch, if the forward pass of the network does not."""
        self._begin_batch()
        if self.trace:
            self.trace.add(batch)

    def _begin_batch(self) -> None:
        if self.heartbeat:
            self.heartbeat.begin_batch()
        self.fault.begin_step(self.step + 1)

    def on_batch_end(self, loss: torch.Tensor) -> None:
        """Records the mean loss of a micro-batch without waiting for the device. It must not be modified later."""
        loss = loss.detach()
        self.finite.on_batch_end(loss)
        if self.trace:
            self.trace.on_batch_end(loss)

    def on_before_optimizer_step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Records the gradient; see `FiniteCheck.on_before_optimizer_step`."""
        self.finite.on_before_optimizer_step(list(parameters), self.step + 1)

    def on_step_skipped(self, scaler: GradScaler) -> None:
        """Records that the scaler skipped the step; see `FiniteCheck.on_step_skipped`."""
        self.finite.on_step_skipped(self.step + 1, scaler)

    def check_finite(self) -> None:
        """Checks the recorded gradients; see `FiniteCheck.check`."""
        self.finite.check()

    def end_step(self, lr: float, metrics: Mapping[str, float] | None) -> None:
        """Records the end of an optimizer step.

        Args:
            lr: The learning rate of the step.
            metrics: The logged metrics if the step is logged; otherwise None.
        """
        self.step += 1
        self.clock.on_step_end(waited=self.finite.checks_each_step or metrics is not None)
        if self.stopwatch:
            self.stopwatch.on_step_end()
        self.finite.forget()
        RANK_STATUS.begin_step(self.step + 1)
        if self.trace:
            self.trace.on_step_end(self.step, lr)
        if metrics and "train_loss" in metrics:
            self.train_loss = float(metrics["train_loss"])

    def close(
        self,
        *,
        epochs: int,
        optimizer_steps: int,
        lr: float | None,
        steps: int | None,
        samples_per_step: int | None,
        stopped_early: str | None = None,
    ) -> Trained:
        """Stops monitoring, and returns the metrics of the training.

        Args:
            epochs: Epochs since the start of the run; the last may be incomplete.
            optimizer_steps: Optimizer steps since the start of the run, without skipped steps.
            lr: The learning rate; of a schedule, its peak. None if it is not known.
            steps: Optimizer steps of the whole run; None if they are not known.
            samples_per_step: Samples of an optimizer step over all ranks; None if they are not known.
            stopped_early: Why a callback stopped the training before its last step, or None.
        """
        RANK_STATUS.begin_step(0)
        for watch in (self.heartbeat, self.trace, self.stopwatch, self.display):
            if watch:
                watch.close()
        for hook in self._hooks:
            hook.remove()
        return Trained(
            steps=self.step,
            steps_now=self.step - self.first_step,
            skipped_steps=self.step - optimizer_steps,
            epochs=epochs,
            loss=self.train_loss,
            seconds=self.clock.seconds,
            lr=lr,
            scheduled_steps=steps,
            samples_per_step=samples_per_step,
            stopped_early=stopped_early,
        )
