"""Records the metrics of a training in the hand-written engines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lit_mnist.data.batch import Batch
from lit_mnist.data.loader import TrainBatches
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.profiling.timer import COPY, KEEPING
from lit_mnist.profiling.timing import StepClock
from lit_mnist.run.finish import finish
from lit_mnist.run.metrics_log import Logger, MetricsLog
from lit_mnist.run.monitor import StepMonitor
from lit_mnist.run.outcome import Outcome, Trained
from lit_mnist.run.progress import ProgressDisplay, describe_epoch
from lit_mnist.training.checkpoint_manager import CheckpointManager
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.job import ExperimentJob
from lit_mnist.training.train_metrics import TrainMetrics


class MetricsRecorder(StepMonitor):
    """A step monitor that also logs and displays the metrics, with one collective in each logged step.

    Args:
        loggers: Loggers of this rank in addition to the files in the run folder; `finish_experiment` closes them.
    """

    def __init__(
        self,
        *,
        job: ExperimentJob,
        rank: Rank,
        clock: StepClock,
        net: nn.Module,
        step: int = 0,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.job, self.plan = job, job.plan
        whole_steps = min(job.plan.total_steps, job.plan.steps_per_epoch)
        super().__init__(job=job, rank=rank, clock=clock, net=net, step=step, epoch_steps=whole_steps)
        self.log_every = job.experiment.trainer.log_every_n_steps
        self._metrics = TrainMetrics()
        self.log: MetricsLog | None = None
        self.loggers = loggers
        if rank.is_first:
            self.log = MetricsLog(job.folder, step, job.columns)
            if job.experiment.trainer.enable_progress_bar:
                self.display = ProgressDisplay(job.plan.total_steps, step)
                RANK_STATUS.clear_display = self.display.clear

    def timed_loaders(self) -> list[type]:
        """Returns the class of the train loader."""
        return [TrainBatches]

    def timed_calls(self) -> list[tuple[Any, str, str]]:
        """Returns the copy of a batch to the device, and the checkpoint manager."""
        return [(Batch, "to", COPY), (CheckpointManager, "on_step_end", KEEPING)]

    def is_logged(self, step: int) -> bool:
        """Returns whether a step, counted from 1, is logged: the first, every nth, and the last of an epoch."""
        ends_epoch = step % self.plan.steps_per_epoch == 0 or step == self.plan.total_steps
        return step == 1 or step % self.log_every == 0 or ends_epoch

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
            NonFiniteError: As for `check_finite`.
        """
        metrics: dict[str, float] | None = None
        if self.is_logged(self.step + 1):
            self.check_finite()
            metrics = {**self._metrics.compute(logits, targets), "lr": lr}
        self.end_step(lr, metrics)
        if metrics is None or not self.rank.is_first:
            return
        if (speed := self.clock.recent_steps_per_s()) is not None:
            metrics["images_per_s"] = speed * self.job.samples_per_step
        self._log(metrics)
        if self.display:
            self.display.update(self.step, metrics)

    def on_epoch_end(self, epoch: int, evaluation: Evaluation | None, *, is_best: bool) -> None:
        """Records the end of an epoch, and logs its validation metrics if there are any."""
        self.clock.pause()
        metrics = name_metrics(evaluation, "val") if evaluation else {}
        self.epoch_line = describe_epoch(
            epoch, self.plan.epochs, self.step, {"train_loss": self.train_loss, **metrics}, is_best=is_best
        )
        if metrics:
            self._log(metrics)

    def show_epoch(self) -> None:
        """Displays the last epoch."""
        if self.display:
            self.display.line(self.epoch_line)

    def end_training(self, *, optimizer_steps: int) -> Trained:
        """Closes the display and the log files, and returns the metrics of the training."""
        epochs = math.ceil(self.step / self.plan.steps_per_epoch)
        trained = self.close(
            epochs=epochs,
            optimizer_steps=optimizer_steps,
            lr=self.plan.lr,
            steps=self.plan.total_steps,
            samples_per_step=self.job.samples_per_step,
        )
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


def name_metrics(evaluation: Evaluation, stage: str) -> dict[str, float]:
    """Returns the metrics to log, with the prefix `val` or `test` in their names."""
    return {f"{stage}_loss": evaluation.loss, f"{stage}_accuracy": evaluation.accuracy}


def make_loggers(job: ExperimentJob, rank: Rank) -> list[Logger]:
    """Returns the loggers of `trainer.logger` on rank 0, none on the other ranks; `finish_experiment` closes them."""
    found = job.options().get("logger") if job.options and rank.is_first else None
    loggers: list[Logger] = found if isinstance(found, list) else [found] if found and found is not True else []
    for logger in loggers:
        logger.log_hyperparams(job.experiment.to_dict())
    return loggers


def finish_experiment(
    job: ExperimentJob,
    rank: Rank,
    *,
    weights: Mapping[str, torch.Tensor],
    clock: StepClock,
    trained: Trained | None,
    validation: Evaluation | None,
    test: Evaluation | None,
    loggers: Sequence[Logger] = (),
) -> None:
    """Closes the loggers, writes the result and the report, and prints the summary; every rank must call it.

    Args:
        job: The job.
        rank: This rank.
        weights: Weights of the bare network after the last step.
        clock: Times of the steps.
        trained: Metrics of the training, if the job trains.
        validation: The last evaluation on the validation split.
        test: The evaluation on the test split, with its examples.
        loggers: Loggers of this rank that no Trainer closes.
    """
    for logger in loggers:
        if test:
            logger.log_metrics(name_metrics(test, "test"), trained.steps if trained else 0)
        logger.finalize("success")
    outcome = Outcome(
        weights,
        clock,
        trained,
        validation=job.note_partial(validation.to_dict() if validation else None, "val"),
        test=job.note_partial(test.to_dict() if test else None, "test"),
        examples=test.examples if test else [],
    )
    finish(job, rank, outcome)
