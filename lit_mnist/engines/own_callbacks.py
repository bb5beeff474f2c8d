"""The callbacks and the logger of a run with the user's own module."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback

from lit_mnist.callbacks import RunLogger
from lit_mnist.checkpoint.atomic_io import atomic_file, atomic_link
from lit_mnist.checkpoint.format import SECTION
from lit_mnist.distributed.gather import all_gather_bytes
from lit_mnist.distributed.heartbeat import Heartbeat
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.errors import InputError, NonFiniteError, StoppedError
from lit_mnist.experiment import RunSettings
from lit_mnist.plugins.checkpoint_io import VerifiedCheckpointIO
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint
from lit_mnist.plugins.global_batch import describe_global_batch
from lit_mnist.plugins.plain_values import NotPlainError, pack, unpack
from lit_mnist.profiling.faults import InjectedError, fault_marker
from lit_mnist.run.metrics_log import MetricsLog
from lit_mnist.run.timing import StepClock

PREDICTIONS = "predictions.pt"
_NEVER = 1 << 62


class MetricsLogger(RunLogger):
    """Logs everything that a module logs to `metrics.csv` and TensorBoard, with steps that count from 1.

    Args:
        log: The log files on rank 0, None on the other ranks.

    Attributes:
        trainer: The Trainer.
        validation: The metrics of the last validation, on rank 0.
    """

    trainer: Trainer

    def __init__(self, log: MetricsLog | None) -> None:
        super().__init__(log, None)
        self.validation: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Logs the metrics of a step, until the training ends."""
        if self._log is None:
            return
        if self.trainer.validating or self.trainer.sanity_checking:
            self.validation = {name: value for name, value in metrics.items() if name != "epoch"}
        self._log.log_metrics(metrics, (step or 0) + 1)


class RunCheckpoint(ExactCheckpoint):
    """Also saves after a time, keeps older checkpoints, and ends a stopped run as the project's own runs end.

    Args:
        dirpath: Folder of `last.ckpt`.
        steps: Number of optimizer steps between two saves, or None.
        seconds: Seconds between two saves, or None.
        keep: Number of newest checkpoints to keep.
        section: The entry `lit_mnist` of each checkpoint.
    """

    def __init__(
        self, dirpath: Path, steps: int | None, seconds: float | None, keep: int, section: Mapping[str, Any]
    ) -> None:
        super().__init__(dirpath, steps or _NEVER)
        self._section = dict(section)
        self._seconds, self._keep, self._saved_at = seconds, keep, time.monotonic()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the settings of the run, and what `ExactCheckpoint` adds."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint[SECTION] = self._section

    def _wants_save(self) -> bool:
        return self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds

    def _save(self) -> None:
        if self._trainer.is_global_zero:
            self._wait()
            folder, before = self.path.parent, self._saved_step
            if self._keep > 1 and before and self.path.exists() and before < self._trainer.global_step:
                atomic_link(self.path, folder / f"step-{before:08d}.ckpt")
            for path in sorted(folder.glob("step-*.ckpt"), reverse=True)[max(0, self._keep - 1) :]:
                path.unlink()
        super()._save()
        self._saved_at = time.monotonic()

    def _exit_if_stopped(self, stop: signal.Signals | None) -> None:
        if stop is None:
            return
        self._wait()
        if self._trainer.world_size > 1:
            # A rank that exits before the checkpoint is written would end rank 0.
            dist.barrier()
        raise StoppedError(f"Stopped by {stop.name} after step {self._trainer.global_step}.", stop)

    def _wait(self) -> None:
        writer = self._trainer.strategy.checkpoint_io
        if isinstance(writer, VerifiedCheckpointIO):
            writer.wait()


class OwnMonitor(Callback):
    """Monitors the steps of a training on one rank: timing, finite losses, heartbeat and injected faults.

    Args:
        run: The section `run`.
        folder: The run folder.
        rank: This rank.
        clock: Times the optimizer steps.
        log_every: Batches between two checks of the losses.

    Attributes:
        steps_now: Optimizer steps since the start of this process.
    """

    def __init__(self, run: RunSettings, folder: Path, rank: Rank, clock: StepClock, log_every: int) -> None:
        self.rank, self.clock, self._log_every = rank, clock, log_every
        self._fault, self._inject, self._marker = run.fault, str(run.inject), fault_marker(folder)
        self._first = self._step = self.steps_now = 0
        self._heartbeat: Heartbeat | None = None
        self._losses: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the global batch, and starts the heartbeat."""
        if self.rank.is_first:
            print_line(f"note: {describe_global_batch(trainer)}")
        self._first = self._step = trainer.global_step
        if self.rank.world_size > 1:
            self._heartbeat = Heartbeat(self.rank, pl_module, self._step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Records the step for a failure report, and injects a fault if one is due."""
        step = trainer.global_step + 1
        RANK_STATUS.begin_step(step)
        if self._fault and self._fault[1:] == (self.rank.rank, step):
            self._fail(pl_module, self._fault[0], step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records the loss of a batch, and the end of an optimizer step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
        due = (batch_idx + 1) % self._log_every == 0
        if due:
            self._check_finite(trainer, pl_module)
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.steps_now = self._step - self._first
            self.clock.on_step_end(waited=due or pl_module.device.type == "cpu")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Checks the losses before a save."""
        self._check_finite(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Excludes validation from step timing."""
        self.clock.pause()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the losses, and prints the epoch."""
        self._check_finite(trainer, pl_module)
        if self.rank.is_first:
            values = [f"{name} {float(value):.4g}" for name, value in trainer.callback_metrics.items()]
            limit = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
            print_line("  ".join([f"epoch {trainer.current_epoch + 1}{limit}  step {trainer.global_step}", *values]))

    def close(self) -> None:
        """Stops the heartbeat, before the process group is destroyed."""
        RANK_STATUS.begin_step(0)
        if self._heartbeat:
            self._heartbeat.close()

    def _check_finite(self, trainer: Trainer, module: LightningModule) -> None:
        """Raises a NonFiniteError on all ranks together if a loss was not finite on one of them."""
        losses, self._losses = self._losses, []
        finite = torch.ones((), device=module.device)
        if losses:
            finite = torch.stack([torch.isfinite(loss).all() for loss in losses]).all().to(torch.float32)
        if self.rank.world_size > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite:
            raise NonFiniteError(
                f"The loss was not finite at step {trainer.global_step} or shortly before: lower the learning rate, or "
                "find the operation with --trainer.detect_anomaly true."
            )

    def _fail(self, module: LightningModule, kind: str, step: int) -> None:
        if self._marker.exists() and self._marker.read_text() == self._inject:
            return
        self._marker.parent.mkdir(parents=True, exist_ok=True)
        self._marker.write_text(self._inject)
        if kind == "nan":
            with torch.no_grad():
                next(module.parameters()).fill_(torch.nan)
        elif kind == "raise":
            raise InjectedError(f"--inject raise: rank {self.rank.rank} fails in step {step}, as requested.")
        else:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


class WritePredictions(BasePredictionWriter):
    """Writes the predictions of all ranks to one file.

    `torch.load("predictions.pt")` returns a list with a dict for each batch: `indices`, the samples of the batch (empty
    for an IterableDataset), `dataloader`, and `output`, what `predict_step` has returned.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.path = folder / PREDICTIONS

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Writes the file.

        Raises:
            InputError: An output is neither a tensor nor a plain value.
        """
        # With one dataloader, the predictions are not nested.
        nested = [predictions] if len(batch_indices) == 1 else predictions
        rows = [
            {"dataloader": number, "indices": list(indices or []), "output": output}
            for number, (outputs, own) in enumerate(zip(nested, batch_indices, strict=True))
            for output, indices in zip(outputs, own or [None] * len(outputs), strict=True)
        ]
        try:
            content = pack(rows)
        except NotPlainError as error:
            raise InputError(
                f"predict_step returns a {error}: return tensors, or lists and dicts of tensors and plain values."
            ) from error
        everyone = [unpack(part, torch.device("cpu")) for part in all_gather_bytes(content)]
        if trainer.is_global_zero:
            merged = [row for part in everyone for row in part]
            merged.sort(key=lambda row: (row["dataloader"], row["indices"]))
            with atomic_file(self.path) as file:
                torch.save(merged, file)
            print_line(f"predicted {len(merged)} batches: {display_path(self.path)}")
