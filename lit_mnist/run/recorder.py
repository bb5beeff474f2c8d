"""Records a training: figures every few steps and epochs, for the screen, `metrics.csv` and TensorBoard."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lit_mnist.distributed.heartbeat import Heartbeat
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.errors import NonFiniteError
from lit_mnist.profiling.faults import inject
from lit_mnist.profiling.trace import Trace
from lit_mnist.run.metrics_log import COLUMNS, MetricsLog
from lit_mnist.run.progress import ProgressDisplay
from lit_mnist.run.result import Trained
from lit_mnist.run.timing import StepClock
from lit_mnist.training.evaluation import Evaluation, classified
from lit_mnist.training.finite import FiniteCheck
from lit_mnist.training.job import Job
from lit_mnist.training.precision import autocast_dtype, weight_dtype

if TYPE_CHECKING:
    from lit_mnist.profiling.stopwatch import Stopwatch

STEPS_BETWEEN_METRICS = 50


class MetricsRecorder:
    """Notes each step, and every few steps puts the ranks' figures together: that is its only collective.

    Args:
        job: The job.
        rank: This rank.
        clock: Times the steps.
        net: The bare network, for what watches it: trace, stopwatch, heartbeat, injected faults.
        step: Optimizer steps made before, where a run is resumed.
    """

    def __init__(self, *, job: Job, rank: Rank, clock: StepClock, net: nn.Module, step: int = 0) -> None:
        self.rank, self.plan, self.clock, self.net = rank, job.plan, clock, net
        self.step = self.first_step = step
        self.train_loss: float | None = None
        self.finite = FiniteCheck(job, rank)
        self.heartbeat = Heartbeat(rank, net, step) if rank.world_size > 1 else None
        inject(job, rank, net, step)
        RANK_STATUS.begin_step(step + 1)
        columns = (*COLUMNS, *job.experiment.data.task.metrics)
        self.history = MetricsLog(job.folder, step, columns) if rank.is_first else None
        self.display = ProgressDisplay(job.plan.total_steps, step) if rank.is_first else None
        if self.display:
            RANK_STATUS.clear_display = self.display.clear
        run = job.experiment.run
        self.trace: Trace | None = None
        self.stopwatch: Stopwatch | None = None
        if run.trace == "times":
            self.stopwatch = _start_stopwatch(self, job)
        elif run.trace != "none":
            dtype = autocast_dtype(job.precision) or weight_dtype(job.precision)
            # An evaluation's collectives, at an epoch's end, belong to no step.
            whole_steps = min(job.plan.total_steps, job.plan.steps_per_epoch) - 1
            last_counted = whole_steps if run.trace == "traffic" else 0
            self.trace = Trace(net, job.folder, rank, dtype=dtype, last_counted=last_counted, keep=run.trace_step)
        self._losses: list[torch.Tensor] = []
        self._epoch_told = ""

    def batch_done(self, loss: torch.Tensor) -> None:
        """Notes a micro-batch's mean loss, without waiting for it to be computed; nobody may change it afterwards."""
        loss = loss.detach()
        self._losses.append(loss)
        self.finite.batch_done(loss)
        if self.trace:
            self.trace.batch_done(loss)

    def gradients_done(self, parameters: Iterable[nn.Parameter]) -> None:
        """Notes a step's gradient before the optimizer makes it; see `FiniteCheck.gradients_done`."""
        self.finite.gradients_done(list(parameters), self.step + 1)

    def step_skipped(self, scaler: GradScaler) -> None:
        """Notes that the scaler leaves out the step that ends; see `FiniteCheck.step_skipped`."""
        self.finite.step_skipped(self.step + 1, scaler)

    def check_finite(self) -> None:
        """Looks at the gradients that were noted and not looked at; see `FiniteCheck.check`."""
        self.finite.check()

    def step_done(self, logits: torch.Tensor, targets: torch.Tensor, lr: float) -> None:
        """Notes the end of an optimizer step.

        Only where it puts the figures together does it read what the device has computed.

        Args:
            logits: The last micro-batch's, [batch, classes], or for segmentation [batch, classes, height, width].
            targets: Its classes, int64 [batch], or for segmentation [batch, height, width].
            lr: The step's learning rate.

        Raises:
            NonFiniteError: The loss is infinite or not a number on some rank; all ranks raise it together.
        """
        self.step += 1
        ends_epoch = self.step % self.plan.steps_per_epoch == 0 or self.step == self.plan.total_steps
        figures: tuple[float, float] | None = None
        if self.step == 1 or self.step % STEPS_BETWEEN_METRICS == 0 or ends_epoch:
            self.check_finite()
            figures = self._over_all_ranks(logits, targets)
        self.clock.step_done(waited=self.finite.at_once or figures is not None)
        if self.stopwatch:
            self.stopwatch.step_done()
        self.finite.forget()
        RANK_STATUS.begin_step(self.step + 1)
        if self.trace:
            self.trace.step_done(self.step, lr)
        if figures is None:
            return
        loss, accuracy = figures
        if not math.isfinite(loss):
            raise NonFiniteError(f"The loss was {loss} at step {self.step} or shortly before: lower --lr.")
        self.train_loss = loss
        if self.history is None or self.display is None:
            return
        speed = self.clock.recent_images_per_s()
        row = {
            "step": self.step,
            "epoch": (self.step - 1) // self.plan.steps_per_epoch,
            "train_loss": loss,
            "train_accuracy": accuracy,
            "lr": lr,
        }
        self.history.add(row if speed is None else {**row, "images_per_s": speed})
        self.display.update(self.step, loss, accuracy, speed)

    def epoch_done(self, epoch: int, evaluation: Evaluation | None, *, is_best: bool) -> None:
        """Notes the end of an epoch, with its metrics on the validation split where there is one; see `show_epoch`."""
        self.clock.pause()
        if self.history is None:
            return
        text = f"epoch {epoch + 1}/{self.plan.epochs}  step {self.step}"
        if self.train_loss is not None:
            text += f"  train loss {self.train_loss:.4f}"
        if evaluation:
            kind = "accuracy" if evaluation.mean_iou is None else "pixel accuracy"
            text += f"  validation loss {evaluation.loss:.4f}  {kind} {evaluation.accuracy:.2%}"
            row = {"step": self.step, "epoch": epoch, "val_loss": evaluation.loss, "val_accuracy": evaluation.accuracy}
            if evaluation.mean_iou is not None:
                text += f"  mean IoU {evaluation.mean_iou:.2%}"
                row["val_mean_iou"] = evaluation.mean_iou
            text += "  best so far" if is_best else ""
            self.history.add(row)
        self._epoch_told = text

    def show_epoch(self) -> None:
        """Shows the epoch that was noted last."""
        if self.display:
            self.display.line(self._epoch_told)

    def close(self, *, optimizer_steps: int, stopped_early: str | None = None) -> Trained:
        """Ends the display, closes the files, and returns the training's figures.

        Args:
            optimizer_steps: Steps that the optimizer really made, from the first of the run.
            stopped_early: Why it ended before its last step, where a callback ended it.
        """
        RANK_STATUS.begin_step(0)
        if self.heartbeat:
            self.heartbeat.close()
        if self.trace:
            self.trace.close()
        if self.stopwatch:
            self.stopwatch.close()
        if self.display:
            self.display.close()
        if self.history:
            self.history.close()
        return Trained(
            steps=self.step,
            steps_now=self.step - self.first_step,
            skipped_steps=self.step - optimizer_steps,
            epochs=math.ceil(self.step / self.plan.steps_per_epoch),
            loss=self.train_loss,
            seconds=self.clock.seconds,
            stopped_early=stopped_early,
        )

    def _over_all_ranks(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """Returns the mean loss since the last figures, and the last micro-batch's accuracy, over all ranks."""
        mean_loss = torch.stack(self._losses).double().mean()
        self._losses = []
        predicted, true = classified(logits.detach(), targets)
        right = (predicted == true).sum().double()
        figures = torch.stack([mean_loss, right, torch.full_like(right, len(true))])
        if self.rank.world_size > 1:
            dist.all_reduce(figures)
        loss, right_ones, count = figures.tolist()
        return loss / self.rank.world_size, right_ones / max(count, 1)


def _start_stopwatch(recorder: MetricsRecorder, job: Job) -> Stopwatch:
    from lit_mnist.profiling.stopwatch import Stopwatch

    stopwatch = Stopwatch(recorder, job.folder)
    stopwatch.start()
    return stopwatch
