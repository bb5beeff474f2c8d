"""Monitors the steps of a training, and records their metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.distributed.heartbeat import Heartbeat
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.errors import NonFiniteError
from lit_mnist.profiling.faults import inject
from lit_mnist.profiling.trace import Trace
from lit_mnist.run.metrics_log import Logger, MetricsLog
from lit_mnist.run.progress import ProgressDisplay
from lit_mnist.run.result import Trained
from lit_mnist.run.timing import StepClock
from lit_mnist.training.evaluation import VALIDATION_METRICS, Evaluation, name_metrics
from lit_mnist.training.finite import FiniteCheck
from lit_mnist.training.job import Job
from lit_mnist.training.precision import autocast_dtype, weight_dtype
from lit_mnist.training.train_metrics import TrainMetrics

if TYPE_CHECKING:
    from lit_mnist.profiling.stopwatch import Stopwatch


class StepMonitor:
    """Monitors the steps of a training on one rank: timing, finite losses, heartbeat, traces and injected faults.

    Args:
        job: The job.
        rank: This rank.
        clock: Times the steps.
        net: The bare network.
        step: Optimizer steps before the run was resumed.

    Attributes:
        step: Optimizer steps so far.
        train_loss: The last logged training loss.
        log_every: Optimizer steps between two logged steps.
        logged: Metrics over all ranks that were logged in the last step; empty if it was not logged.
        epoch_line: Summary of the last epoch.
        display: The progress display on rank 0, None on the other ranks.
    """

    def __init__(self, *, job: Job, rank: Rank, clock: StepClock, net: nn.Module, step: int = 0) -> None:
        self.rank, self.plan, self.clock, self.net = rank, job.plan, clock, net
        self.step = self.first_step = step
        self.train_loss: float | None = None
        self.logged: dict[str, float] = {}
        self.epoch_line = ""
        self.display: ProgressDisplay | None = None
        self.log_every = job.experiment.trainer.log_every_n_steps
        self.finite = FiniteCheck(job, rank)
        self.heartbeat = Heartbeat(rank, net, step) if rank.world_size > 1 else None
        inject(job, rank, net, step)
        RANK_STATUS.begin_step(step + 1)
        run = job.experiment.run
        self.trace: Trace | None = None
        self.stopwatch: Stopwatch | None = None
        if run.trace == "times":
            self.stopwatch = _start_stopwatch(self, job)
        elif run.trace != "none":
            dtype = autocast_dtype(job.precision) or weight_dtype(job.precision)
            # The last step of an epoch is not counted: the collectives of the validation follow it.
            whole_steps = min(job.plan.total_steps, job.plan.steps_per_epoch) - 1
            last_counted = whole_steps if run.trace == "traffic" else 0
            self.trace = Trace(net, job.folder, rank, dtype=dtype, last_counted=last_counted, keep=run.trace_step)

    def is_logged(self, step: int) -> bool:
        """Returns whether a step, counted from 1, is logged: the first, every nth, and the last of an epoch."""
        ends_epoch = step % self.plan.steps_per_epoch == 0 or step == self.plan.total_steps
        return step == 1 or step % self.log_every == 0 or ends_epoch

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
            metrics: Metrics over all ranks, with `train_loss`, if the step is logged; otherwise None.

        Raises:
            NonFiniteError: The loss is infinite or NaN on some rank; all ranks raise it together.
        """
        self.step += 1
        self.clock.on_step_end(waited=self.finite.checks_each_step or metrics is not None)
        if self.stopwatch:
            self.stopwatch.on_step_end()
        self.finite.forget()
        RANK_STATUS.begin_step(self.step + 1)
        if self.trace:
            self.trace.on_step_end(self.step, lr)
        if metrics is None:
            return
        loss = float(metrics["train_loss"])
        if not math.isfinite(loss):
            raise NonFiniteError(f"The loss was {loss} at step {self.step} or shortly before: lower --lr.")
        self.train_loss = loss

    def on_epoch_end(self, epoch: int, evaluation: Evaluation | None, *, is_best: bool) -> None:
        """Records the end of an epoch, and its validation metrics if there are any."""
        self.clock.pause()
        text = f"epoch {epoch + 1}/{self.plan.epochs}  step {self.step}"
        if self.train_loss is not None:
            text += f"  train loss {self.train_loss:.4f}"
        if evaluation:
            text += f"  validation loss {evaluation.loss:.4f}  accuracy {evaluation.accuracy:.2%}"
            text += "  best so far" if is_best else ""
        self.epoch_line = text

    def close(self, *, optimizer_steps: int, stopped_early: str | None = None) -> Trained:
        """Stops monitoring, and returns the metrics of the training.

        Args:
            optimizer_steps: Optimizer steps since the start of the run, without skipped steps.
            stopped_early: Why a callback stopped the training before its last step, or None.
        """
        RANK_STATUS.begin_step(0)
        for watch in (self.heartbeat, self.trace, self.stopwatch, self.display):
            if watch:
                watch.close()
        return Trained(
            steps=self.step,
            steps_now=self.step - self.first_step,
            skipped_steps=self.step - optimizer_steps,
            epochs=math.ceil(self.step / self.plan.steps_per_epoch),
            loss=self.train_loss,
            seconds=self.clock.seconds,
            stopped_early=stopped_early,
        )


class MetricsRecorder(StepMonitor):
    """A step monitor that also logs and displays the metrics, with one collective in each logged step.

    Args:
        loggers: Loggers of this rank in addition to the files in the run folder; `finish` closes them.
    """

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        clock: StepClock,
        net: nn.Module,
        step: int = 0,
        loggers: Sequence[Logger] = (),
    ) -> None:
        super().__init__(job=job, rank=rank, clock=clock, net=net, step=step)
        self._metrics = TrainMetrics()
        self.log: MetricsLog | None = None
        self.loggers = loggers
        if rank.is_first:
            self.log = MetricsLog(job.folder, step, VALIDATION_METRICS)
            if job.experiment.trainer.enable_progress_bar:
                self.display = ProgressDisplay(job.plan.total_steps, step)
                RANK_STATUS.clear_display = self.display.clear

    def on_batch_end(self, loss: torch.Tensor) -> None:
        """Records the mean loss of a micro-batch."""
        super().on_batch_end(loss)
        self._metrics.update(loss)

    def on_step_end(self, logits: torch.Tensor, targets: torch.Tensor, lr: float) -> None:
        """Records the end of an optimizer step, and logs its metrics if they are due.

        Args:
            logits: Logits of the last micro-batch, float [batch, classes] or [batch, classes, height, width].
            targets: Classes of the last micro-batch, int64 [batch] or [batch, height, width].
            lr: The learning rate of the step.

        Raises:
            NonFiniteError: As for `end_step`.
        """
        metrics: dict[str, float] | None = None
        if self.is_logged(self.step + 1):
            self.check_finite()
            metrics = {**self._metrics.compute(logits, targets), "lr": lr}
        self.end_step(lr, metrics)
        if metrics is None or not self.rank.is_first:
            return
        speed = self.clock.recent_images_per_s()
        self._log(metrics if speed is None else {**metrics, "images_per_s": speed})
        if self.display:
            self.display.update(self.step, metrics["train_loss"], metrics["train_accuracy"], speed)

    def on_epoch_end(self, epoch: int, evaluation: Evaluation | None, *, is_best: bool) -> None:
        """Records the end of an epoch, and logs its validation metrics if there are any."""
        super().on_epoch_end(epoch, evaluation, is_best=is_best)
        if evaluation:
            self._log(name_metrics(evaluation, "val"))

    def show_epoch(self) -> None:
        """Displays the last epoch."""
        if self.display:
            self.display.line(self.epoch_line)

    def close(self, *, optimizer_steps: int, stopped_early: str | None = None) -> Trained:
        """Closes the display and the log files, and returns the metrics of the training."""
        trained = super().close(optimizer_steps=optimizer_steps, stopped_early=stopped_early)
        if self.log:
            self.log.finalize("success")
        return trained

    def _log(self, metrics: dict[str, float]) -> None:
        row = {"epoch": float((self.step - 1) // self.plan.steps_per_epoch), **metrics}
        if self.log:
            self.log.log_metrics(row, self.step)
        for logger in self.loggers:
            # Lightning's loggers count steps from 0.
            logger.log_metrics(row, self.step - 1)
            logger.save()


def _start_stopwatch(monitor: StepMonitor, job: Job) -> Stopwatch:
    from lit_mnist.profiling.stopwatch import Stopwatch

    stopwatch = Stopwatch(monitor, job.folder)
    stopwatch.start()
    return stopwatch
