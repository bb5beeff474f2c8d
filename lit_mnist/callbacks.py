"""The callbacks, the logger and the checkpoint IO of the Trainer, which record, display and save a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lit_mnist.checkpoint.format import LAST, SECTION, read_checkpoint
from lit_mnist.module import LitClassifier
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.run.metrics_log import MetricsLog
from lit_mnist.run.progress import ProgressDisplay
from lit_mnist.run.recorder import StepMonitor
from lit_mnist.training.checkpoint_manager import CheckpointManager
from lit_mnist.training.job import Job
from lit_mnist.training.state import loops_after, make_section


class RunLogger(Logger):
    """Logs training and validation metrics to `metrics.csv` and TensorBoard; test metrics go to `result.json`.

    Args:
        log: The log files on rank 0, None on the other ranks.
        monitor: Counts the steps from 1; a Trainer counts the steps of its loggers from 0. None if a
            subclass counts the steps itself.
    """

    def __init__(self, log: MetricsLog | None, monitor: StepMonitor | None) -> None:
        super().__init__()
        self._log, self._monitor = log, monitor

    @property
    def name(self) -> str:
        """Returns the name of the logger."""
        return "lit_mnist"

    @property
    def version(self) -> str:
        """Empty: the run folder has no version."""
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `config.yaml` in the run folder has the hyperparameters."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Logs the metrics of the current step, until training ends."""
        if self._log and self._monitor:
            self._log.log_metrics(metrics, self._monitor.step)

    def finalize(self, status: str) -> None:
        """Closes the files."""
        if self._log:
            self._log.finalize(status)
            self._log = None


class RunProgressBar(ProgressBar):
    """Displays the training progress: a bar on a terminal, otherwise a line every few seconds.

    Args:
        display: The display on rank 0, None on the other ranks.
        monitor: The monitor of this rank.
    """

    def __init__(self, display: ProgressDisplay | None, monitor: StepMonitor) -> None:
        super().__init__()
        self.display, self.monitor = display, monitor

    def disable(self) -> None:
        """Disables the display on this rank."""
        self.display = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Displays the metrics that were logged in this step."""
        if self.display and self.monitor.logged:
            metrics = self.monitor.logged
            speed = metrics.get("images_per_s")
            self.display.update(self.monitor.step, metrics["train_loss"], metrics["train_accuracy"], speed)

    def show_epoch(self) -> None:
        """Displays the last epoch. `RunCheckpoint` calls it after saving: a blocked terminal cannot delay it."""
        if self.display:
            self.display.line(self.monitor.epoch_line)


class StepMonitorCallback(Callback):
    """Passes each step to a `StepMonitor`, and logs the due steps that the Trainer skips.

    Args:
        monitor: The monitor of this rank.
    """

    def __init__(self, monitor: StepMonitor) -> None:
        self.monitor = monitor
        self._optimizer_steps, self._lr = 0, 0.0
        self._parameters = list(monitor.net.parameters())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the loss of a micro-batch."""
        self.monitor.on_batch_end(cast(LitClassifier, pl_module).train_metrics.last)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Records the gradient of the step."""
        self._optimizer_steps = cast(LitClassifier, pl_module).optimizer_steps
        self._lr = optimizer.param_groups[0]["lr"]
        self.monitor.on_before_optimizer_step(self._parameters)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records the step if the micro-batch ends an accumulation window."""
        if trainer.global_step == self.monitor.step:
            self.monitor.logged = {}
            return
        if cast(LitClassifier, pl_module).optimizer_steps == self._optimizer_steps:
            self.monitor.on_step_skipped(_grad_scaler(trainer))
        step = self.monitor.step + 1
        logged: dict[str, float] = {}
        if self.monitor.is_logged(step):
            self.monitor.check_finite()
            names = ("train_loss", "train_accuracy", "lr")
            logged = {name: float(trainer.callback_metrics[name]) for name in names}
        self.monitor.end_step(self._lr, logged or None)
        if logged and (speed := self.monitor.clock.recent_images_per_s()) is not None:
            logged["images_per_s"] = speed
            pl_module.log("images_per_s", speed)
        self.monitor.logged = logged
        if logged and step % self.monitor.log_every and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics({**logged, "epoch": float(trainer.current_epoch)}, step=step - 1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Excludes validation from step timing."""
        self.monitor.clock.pause()


def _grad_scaler(trainer: Trainer) -> GradScaler:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    assert isinstance(scaler, GradScaler), "only a GradScaler skips steps"
    return scaler


class RunCheckpoint(Checkpoint):
    """Saves checkpoints when the manager decides, in the format shared by all engines.

    Args:
        job: The job; its experiment is part of each checkpoint.
        monitor: The monitor of this rank.
    """

    def __init__(self, job: Job, monitor: StepMonitor) -> None:
        self.job, self.monitor = job, monitor
        self.manager = CheckpointManager(
            job, monitor.rank, monitor.net, self._save, step=monitor.step, check_finite=monitor.check_finite
        )
        self._validated = False

    @property
    def state_key(self) -> str:
        """The key of the best score in a checkpoint."""
        # Keep this key for compatibility with older checkpoints.
        return "KeepCheckpoints"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stores the Trainer for `_save`."""
        self._trainer = trainer

    def _save(self) -> None:
        # The manager chooses the file; see RunCheckpointIO.save_checkpoint.
        self._trainer.save_checkpoint(self.manager.folder / LAST)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves after an optimizer step if a save is due."""
        plan = self.job.plan
        if plan.ends_accumulation_window(batch_idx):
            last = batch_idx + 1 == plan.batches_in_epoch(trainer.current_epoch)
            self.manager.on_step_end(trainer.global_step, ends_epoch=last)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Marks that new validation metrics are available."""
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Updates the best score, and saves."""
        validation = cast(LitClassifier, pl_module).evaluation if self._validated else None
        self._validated = False
        is_best = self.manager.update_best(validation)
        self.monitor.on_epoch_end(trainer.current_epoch, validation, is_best=is_best)
        bar = trainer.progress_bar_callback
        show = bar.show_epoch if isinstance(bar, RunProgressBar) else lambda: None
        self.manager.on_epoch_end(trainer.global_step, show)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best score."""
        return {"best": self.manager.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the best score."""
        self.manager.resume(state_dict["best"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Recomputes the loop progress from the global step, ignoring the stored value."""
        checkpoint["loops"] = loops_after(checkpoint["global_step"], self.job.plan)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the project's section, and the epoch and loop progress computed from the global step."""
        step = checkpoint["global_step"]
        checkpoint["epoch"] = self.job.plan.position(step)[0]
        checkpoint["loops"] = loops_after(step, self.job.plan)
        checkpoint[SECTION] = make_section(self.job)


class RunCheckpointIO(VerifiedCheckpointIO):
    """Reads and writes the checkpoints of a run folder, in the format of all engines.

    Args:
        write: Writes a checkpoint of this run on rank 0; None for a run that saves none.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None] | None) -> None:
        # The checkpoint manager has a writer of its own.
        super().__init__(background=False)
        self._write = write

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint of this run."""
        assert self._write is not None
        # `path` is ignored: the manager writes `last.ckpt` in the background, and `best.ckpt` for the best score.
        self._write(checkpoint)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns a verified checkpoint on the CPU."""
        return read_checkpoint(Path(path))
