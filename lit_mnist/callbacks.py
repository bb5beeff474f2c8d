"""The Trainer's callbacks: record each step, and keep the last and the best epoch's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO

from lit_mnist.errors import InputError
from lit_mnist.job import Job
from lit_mnist.module import LitClassifier
from lit_mnist.training.checkpoint import BEST, LAST, SECTION, read_checkpoint, write_checkpoint
from lit_mnist.training.recorder import Recorder


class VerifiedCheckpointIO(CheckpointIO):
    """Reads and writes checkpoints in the project's one format: whole, hashed, and never executing anything."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint.

        Raises:
            InputError: It cannot be written.
        """
        try:
            write_checkpoint(Path(path), checkpoint)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError where the disk is full
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise InputError(f"The checkpoint {path} cannot be written: {reason}.") from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns a verified checkpoint, on the CPU."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint."""
        Path(path).unlink(missing_ok=True)


class RecordTraining(Callback):
    """Passes each step and epoch to the recorder.

    Args:
        recorder: Where they go.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._steps = recorder.step

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records a micro-batch, and the step where it ends one."""
        self.recorder.batch_done(outputs["mean_loss"])
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.recorder.step_done(outputs["logits"], batch.targets, cast(LitClassifier, module).rate)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Leaves the evaluation out of the time of a step."""
        self.recorder.clock.pause()


class KeepCheckpoints(Callback):
    """Saves the last epoch, and the best by validation accuracy (without a validation split the last is the best).

    Args:
        job: The job, whose experiment goes into the checkpoint.
        recorder: Tells the epoch's line.
    """

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self.job = job
        self.recorder = recorder
        self.best = -1.0

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Saves the epoch that ends."""
        validation = cast(LitClassifier, module).validation
        accuracy = validation.accuracy if validation else None
        is_best = accuracy is None or accuracy > self.best
        if accuracy is not None and is_best:
            self.best = accuracy
        folder = self.job.folder / "checkpoints"
        trainer.save_checkpoint(folder / LAST)
        if is_best:
            trainer.save_checkpoint(folder / BEST)
        self.recorder.epoch_done(trainer.current_epoch, validation, "  best so far" if validation and is_best else "")

    def state_dict(self) -> dict[str, Any]:
        """Returns the best accuracy so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the best accuracy so far."""
        self.best = state_dict["best"]

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the project's section."""
        checkpoint[SECTION] = self.job.checkpoint_section()
