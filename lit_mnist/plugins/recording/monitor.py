"""Monitors the steps of a Trainer for a run folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.terminal import print_line
from lit_mnist.plugins.global_batch import describe_global_batch, global_batch, train_loaders
from lit_mnist.plugins.lightning_internals import logged_steps, step_metrics
from lit_mnist.plugins.loader_proxy import unwrapped
from lit_mnist.plugins.recording.logger import RunLogger
from lit_mnist.plugins.recording.progress import RunProgressBar
from lit_mnist.profiling.timing import StepClock
from lit_mnist.run.finite import FiniteCheck
from lit_mnist.run.job import Job
from lit_mnist.run.metrics_log import MetricsLog
from lit_mnist.run.monitor import StepMonitor
from lit_mnist.run.outcome import Trained
from lit_mnist.run.progress import ProgressDisplay, describe_epoch


class StepMonitorCallback(Callback):
    """Passes each step to a `StepMonitor`, and logs the first and the last step of an epoch, which the Trainer skips.

    Args:
        job: The job.
        rank: This rank.
        clock: Times the steps.
        network: The network whose weights are the result.
        logger: The logger of the run folder.
        bar: The progress display, or None.

    Attributes:
        monitor: The monitor, once the training has begun.
        optimizer_steps: Optimizer steps since the start of the run, without those that the GradScaler skipped.
        samples_per_step: Samples of an optimizer step over all ranks; None if unknown.
    """

    monitor: StepMonitor

    def __init__(
        self,
        job: Job,
        rank: Rank,
        clock: StepClock,
        network: nn.Module,
        logger: RunLogger,
        bar: RunProgressBar | None,
    ) -> None:
        self._job, self._rank, self._clock, self._network = job, rank, clock, network
        self._logger, self._bar = logger, bar
        self.optimizer_steps = self._before = 0
        self._lr: float | None = None
        self._peak: float | None = None
        self.samples_per_step = job.samples_per_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to monitor: the position of a resumed training run is known."""
        whole, accumulate = trainer.num_training_batches, trainer.accumulate_grad_batches
        steps = math.ceil(whole / accumulate) if math.isfinite(whole) else None
        self.monitor = _Monitor(
            sorted({type(unwrapped(loader)) for loader in train_loaders(trainer)}, key=str),
            job=self._job,
            rank=self._rank,
            clock=self._clock,
            net=self._network,
            step=trainer.global_step,
            epoch_steps=steps,
            forward=self._network is not pl_module,
        )
        self.monitor.finite.shared = _shares_gradient(trainer, pl_module)
        self._parameters = list(pl_module.parameters())
        self._spoils_loss = self._network is pl_module and self.monitor.fault.is_nan
        for optimizer in trainer.optimizers:
            # The GradScaler does not call the optimizer in a step that it skips.
            optimizer.register_step_post_hook(self._count_step)
        self._observe_losses(trainer)
        if self.samples_per_step is None:
            self.samples_per_step = global_batch(trainer)
            if self._rank.is_first:
                print_line(f"note: {describe_global_batch(trainer)}")
        self._logger.trainer = trainer
        if self._rank.is_first:
            self._logger.log = MetricsLog(self._job.folder, logged_steps(trainer), self._job.columns)
            if self._bar and self._bar.is_enabled:
                display = ProgressDisplay(self.total_steps(trainer), trainer.global_step)
                self.monitor.display = self._bar.display = display
                RANK_STATUS.clear_display = display.clear

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Monitors a resumed training run that was complete, which makes no step."""
        if "monitor" not in vars(self):
            self.on_train_start(trainer, pl_module)

    def _count_step(self, *_: Any) -> None:
        self.optimizer_steps += 1

    def total_steps(self, trainer: Trainer) -> int | None:
        """Returns the optimizer steps of the whole run, or None if they are not known."""
        if self._job.total_steps is not None:
            return self._job.total_steps
        estimated = trainer.estimated_stepping_batches
        return int(estimated) if math.isfinite(estimated) else None

    def _observe_losses(self, trainer: Trainer) -> None:
        """Records the loss that each training step returns, before the Trainer scales it."""
        strategy = trainer.strategy
        train = strategy.training_step

        def training_step(*arguments: Any, **options: Any) -> Any:
            output = train(*arguments, **options)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, torch.Tensor) and self._spoils_loss:
                loss = self.monitor.fault.spoil(loss)
                output = {**output, "loss": loss} if isinstance(output, Mapping) else loss
            if isinstance(loss, torch.Tensor):
                # `ExactAccumulation` has scaled it.
                self.monitor.on_batch_end(getattr(loss, "mean_loss", loss))
            return output

        vars(strategy)["training_step"] = training_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Records the start of a micro-batch, unless the forward pass of the network does."""
        if self._network is pl_module:
            self.monitor.on_batch_start(batch)
            if not pl_module.automatic_optimization:
                self.monitor.fault.spoil_parameter(self._parameters)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Records the gradient of the step."""
        self._before = self.optimizer_steps
        self._lr = float(optimizer.param_groups[0]["lr"])
        self._peak = max(self._lr, self._peak or 0.0)
        self.monitor.on_before_optimizer_step(self._parameters)

    def on_graphed_step(self, update: Callable[[FiniteCheck, int], None]) -> None:
        """Runs an update that checks by itself whether the GradScaler skipped the step."""
        self._before = -1
        update(self.monitor.finite, self.monitor.step + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records the step if the micro-batch ends an accumulation window."""
        monitor = self.monitor
        monitor.logged = {}
        if trainer.global_step == monitor.step:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if isinstance(scaler, GradScaler) and self.optimizer_steps == self._before:
            monitor.on_step_skipped(scaler)
        # Several optimizers may have made a step each.
        monitor.step = trainer.global_step - 1
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined] # Lightning sets it elsewhere
        is_last = batch_idx + 1 == trainer.num_training_batches
        due, step = logged_steps(trainer) + 1, monitor.step + 1
        if not (due == 1 or (every > 0 and due % every == 0) or is_last):
            monitor.end_step(self._lr or 0.0, None)
            return
        monitor.check_finite()
        metrics = step_metrics(trainer)
        monitor.end_step(self._lr or 0.0, metrics)
        if self.samples_per_step and (speed := self._clock.recent_steps_per_s()) is not None:
            metrics["images_per_s"] = speed * self.samples_per_step
            pl_module.log("images_per_s", metrics["images_per_s"], batch_size=1)
        monitor.logged = metrics
        if monitor.display:
            monitor.display.update(step, metrics)
        if every and due % every and metrics and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({**metrics, "epoch": float(trainer.current_epoch)}, step=due - 1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Excludes validation from step timing."""
        self._clock.pause()

    def describe_epoch(self, trainer: Trainer, *, is_validated: bool, is_best: bool) -> str:
        """Returns the line of the epoch that ends."""
        self._clock.pause()
        logged = trainer.callback_metrics if is_validated else ()
        names = [name for name in logged if name.startswith(("val_", "val/", "valid"))]
        metrics = {name: float(trainer.callback_metrics[name]) for name in names}
        epochs = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None
        loss = {"train_loss": self.monitor.train_loss}
        return describe_epoch(trainer.current_epoch, epochs, trainer.global_step, {**loss, **metrics}, is_best=is_best)

    def close(self, trainer: Trainer, *, stopped_early: str | None) -> Trained:
        """Stops monitoring, and returns the metrics of the training."""
        return self.monitor.close(
            epochs=trainer.current_epoch,
            optimizer_steps=self.optimizer_steps,
            lr=self._peak if self._job.lr is None else self._job.lr,
            steps=self.total_steps(trainer),
            samples_per_step=self.samples_per_step,
            stopped_early=stopped_early,
        )


class _Monitor(StepMonitor):
    def __init__(self, loaders: list[type], **options: Any) -> None:
        self._loaders = loaders
        super().__init__(**options)

    def timed_loaders(self) -> list[type]:
        """Returns the classes of the train dataloaders."""
        return self._loaders


def _shares_gradient(trainer: Trainer, module: LightningModule) -> bool:
    """Returns whether all ranks have the same gradient when an optimizer uses it."""
    if not module.automatic_optimization:
        return False
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy) and not ignored
