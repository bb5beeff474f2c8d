"""The Trainer's callbacks: record each step, and keep the last and the best epoch's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import CheckpointIO
from torch.optim import Optimizer

from lit_mnist.checkpoint.format import LAST, SECTION, read_checkpoint
from lit_mnist.checkpoint.manager import CheckpointManager
from lit_mnist.checkpoint.state import lightning_loops, section_of
from lit_mnist.module import LitClassifier
from lit_mnist.run.recorder import MetricsRecorder
from lit_mnist.training.job import Job


class VerifiedCheckpointIO(CheckpointIO):
    """Reads and writes checkpoints in the project's one format: whole, hashed, and never executing anything."""

    def __init__(self, manager: CheckpointManager | None) -> None:
        self._keeper = manager

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Passes a checkpoint of the manager's on to it; it is on rank 0 that this is called."""
        assert self._keeper is not None
        self._keeper.write(checkpoint)

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

    def __init__(self, recorder: MetricsRecorder) -> None:
        self.recorder = recorder
        self._steps = recorder.step
        self._made = 0
        self._parameters = list(recorder.net.parameters())

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        """Records a micro-batch."""
        self.recorder.batch_done(cast(LitClassifier, module).loss)

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Looks at the gradient of the step that comes."""
        self._made = cast(LitClassifier, module).optimizer_steps
        self.recorder.gradients_done(self._parameters)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records the step where a micro-batch ends one."""
        if trainer.global_step > self._steps:
            self._steps, classifier = trainer.global_step, cast(LitClassifier, module)
            if classifier.optimizer_steps == self._made:
                scaler = cast(MixedPrecision, trainer.precision_plugin).scaler
                assert scaler
                self.recorder.step_skipped(scaler)
            self.recorder.step_done(outputs["logits"], batch.targets, classifier.rate)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Leaves the evaluation out of the time of a step."""
        self.recorder.clock.pause()


class KeepCheckpoints(Callback):
    """Saves where the manager says so, in the one format of all engines.

    Args:
        job: The job, whose experiment goes into the checkpoint.
        recorder: Tells the epoch's line.
    """

    def __init__(self, job: Job, recorder: MetricsRecorder) -> None:
        self.job = job
        self.recorder = recorder
        self.manager = CheckpointManager(
            job, recorder.rank, recorder.net, self._save, step=recorder.step, check_finite=recorder.check_finite
        )

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Takes the Trainer, which writes the checkpoints."""
        self._trainer = trainer

    def _save(self) -> None:
        # The manager knows under which names; see VerifiedCheckpointIO.
        self._trainer.save_checkpoint(self.manager.folder / LAST)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves after a step where it is due."""
        plan = self.job.plan
        if plan.closes_window(batch_idx):
            last = batch_idx + 1 == plan.batches_in_epoch(trainer.current_epoch)
            self.manager.step_done(trainer.global_step, ends_epoch=last)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Saves the epoch that ends."""
        validation = cast(LitClassifier, module).validation
        self.recorder.epoch_done(trainer.current_epoch, validation, is_best=self.manager.update_best(validation))
        self.manager.epoch_done(trainer.global_step, self.recorder.show_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the best score so far."""
        return {"best": self.manager.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the best score so far."""
        self.manager.resume(state_dict["best"])

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes the loops' progress from the step alone, whatever the file says of them."""
        checkpoint["loops"] = lightning_loops(checkpoint["global_step"], self.job.plan)

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the project's section, and writes the loops' progress as a function of the step."""
        step = checkpoint["global_step"]
        checkpoint["epoch"] = self.job.plan.position(step)[0]
        checkpoint["loops"] = lightning_loops(step, self.job.plan)
        checkpoint[SECTION] = section_of(self.job)
