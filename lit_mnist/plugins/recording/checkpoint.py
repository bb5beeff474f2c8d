"""The checkpoints of a run folder: the last one, the best one, and older ones."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.nn.utils import get_total_norm

from lit_mnist.checkpoint.format import BEST, SECTION, write_serialized
from lit_mnist.checkpoint.serialization import plain_values, serialize
from lit_mnist.checkpoint.store import CheckpointFolder
from lit_mnist.distributed.rank import print_once
from lit_mnist.errors import NonFiniteError, StoppedError
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint
from lit_mnist.plugins.exact_entry import KEY, has_ended
from lit_mnist.plugins.recording.monitor import StepMonitorCallback
from lit_mnist.plugins.recording.progress import RunProgressBar
from lit_mnist.run.job import Job

_NEVER = 1 << 62
# Without `run.save_every`, a long epoch is saved as often.
_SECONDS_BETWEEN = 600.0
# The metrics that select the best weights, the first that is logged, and whether a higher value is better.
_MONITORED = (("val_accuracy", True), ("val_acc", True), ("val_loss", False))


class RunCheckpoint(ExactCheckpoint):
    """Saves each epoch, keeps the best and the newest checkpoints, and ends a stopped run with its exit code.

    Args:
        job: The job.
        monitor: The monitor of this rank.
        bar: The progress display, or None.

    Attributes:
        best: The best score so far, higher is better; negative infinity if there is none.
    """

    def __init__(self, job: Job, monitor: StepMonitorCallback, bar: RunProgressBar | None) -> None:
        run = job.run
        super().__init__(job.folder / "checkpoints", run.save_steps or _NEVER)
        self.job, self.monitor, self.bar = job, monitor, bar
        self._seconds = run.save_seconds or (None if run.save_steps else _SECONDS_BETWEEN)
        self._saved_at = time.monotonic()
        self.best = -math.inf
        self._is_validated = self._is_best = self._ended_epoch = False
        self._line = ""
        self._files: RunCheckpointIO

    @property
    def state_key(self) -> str:
        """The key of the best score in a checkpoint, which all engines use."""
        return "KeepCheckpoints"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepares a fit."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._io = self._files = RunCheckpointIO(self.path.parent, self.job.run.keep, self._next_file)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Marks that new validation metrics are available."""
        self._is_validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Updates the best score. The epoch is saved before the next batch is loaded, or at the end."""
        is_validated, self._is_validated, self._ended_epoch = self._is_validated, False, True
        score = self._score(trainer) if is_validated else None
        # Until the first validation, the newest weights are the best.
        self._is_best = score > self.best if score is not None else self.best == -math.inf
        if score is not None and self._is_best:
            self.best = score
        shown = self._is_best and score is not None
        self._line = self.monitor.describe_epoch(trainer, is_validated=is_validated, is_best=shown)

    def _score(self, trainer: Trainer) -> float | None:
        for name, higher in _MONITORED:
            if name in trainer.callback_metrics:
                if self.job.samples_per_step is None and self.best == -math.inf and trainer.is_global_zero:
                    print_once(f"note: {BEST} is the epoch with the {'highest' if higher else 'lowest'} {name}")
                value = float(trainer.callback_metrics[name])
                return None if math.isnan(value) else value if higher else -value
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the best score."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the best score, unless the best checkpoint was damaged and removed."""
        if (self.path.parent / BEST).exists():
            self.best = float(state_dict["best"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the project's section to the checkpoints of this callback."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._saving:
            checkpoint[SECTION] = self.job.section()
            checkpoint["steps_made"] = self.monitor.optimizer_steps

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restores the position, which may be a function of the step."""
        step = checkpoint["global_step"]
        position, total = self.job.position(step), self.job.total_steps or 0
        # With more steps, a training continues within the epoch in which it ended.
        if position and (KEY not in checkpoint or (step < total and has_ended(checkpoint))):
            checkpoint.pop(KEY, None)
            checkpoint.update(position)
        if trainer.state.fn == "fit":
            resumed = self.job.checkpoint
            self.monitor.optimizer_steps = int(checkpoint.get("steps_made", step))
            if resumed is not None and resumed.resolve() == self.path.resolve():
                self._files.last_step = step
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def _between_batches(self) -> None:
        if self._files.has_failed:
            self._files.wait()
        super()._between_batches()

    def _is_due(self, step: int) -> bool:
        every = self.every_n_train_steps
        return self._ended_epoch or step // every > self._saved_step // every

    def _wants_save(self) -> bool:
        late = self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds
        return late and self._trainer.is_global_zero

    def _save(self) -> None:
        monitor, trainer = self.monitor.monitor, self._trainer
        monitor.check_finite()
        weights = [each.detach() for each in trainer.lightning_module.parameters() if each.requires_grad]
        # A single read of the largest value checks all weights.
        if weights and not math.isfinite(float(get_total_norm(weights, math.inf))):
            raise NonFiniteError(
                f"A weight was not finite after step {trainer.global_step}, which is not saved: lower --lr."
            )
        super()._save()
        self._is_best = self._ended_epoch = False
        self._saved_at = time.monotonic()
        if self.bar and self.bar.display and self._line:
            self.bar.display.line(self._line)
        self._line = ""

    def _next_file(self) -> tuple[int, bool]:
        """Returns the step of the checkpoint that is saved now, and whether it is the best one."""
        return self._trainer.global_step, self._is_best

    def _exit_if_stopped(self, stop: signal.Signals | None) -> None:
        if stop is None:
            return
        self._files.wait()
        if self._trainer.world_size > 1:
            # A rank that exits before the checkpoint is written would end rank 0.
            dist.barrier()
        raise StoppedError(f"Stopped by {stop.name} after step {self._trainer.global_step}.", stop)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Waits for the last write, before a rank that has failed ends the others."""
        if "_files" not in vars(self):
            # An earlier `setup`, such as that of a callback of the user, has failed.
            return
        super().on_exception(trainer, pl_module, exception)
        self._files.finish()
        if isinstance(exception, NonFiniteError) and trainer.world_size > 1:
            # All ranks raise it.
            dist.barrier()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits for the last write, and restores the Trainer."""
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            self._files.wait()


class RunCheckpointIO(VerifiedCheckpointIO):
    """Reads and writes the checkpoints of a run folder.

    Args:
        folder: The folder of the checkpoints.
        keep: Number of newest checkpoints to keep, beside the best.
        next_file: Returns the step of a checkpoint, and whether it is the best one.

    Attributes:
        last_step: The step of the last checkpoint before the first save, if it is known to be valid.
    """

    def __init__(self, folder: Path, keep: int, next_file: Callable[[], tuple[int, bool]]) -> None:
        super().__init__()
        self._folder, self._keep, self._next_file = folder, keep, next_file
        self.last_step: int | None = None
        self._files: CheckpointFolder | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the last write has ended with an error, which `wait` raises."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Copies a checkpoint to memory, and begins to write it."""
        step, is_best = self._next_file()
        content = serialize(plain_values(checkpoint))
        self.wait()
        if self._files is None:
            self._files = CheckpointFolder(self._folder, keep=self._keep, last_step=self.last_step)
        files = self._files
        self._run(lambda: files.put(lambda file: write_serialized(file, content), step, is_best=is_best))

    def finish(self) -> None:
        """Waits for the writer after an error, which a failed write must not hide."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.exception()
