"""The checkpoint manager: when a training saves, which checkpoints it keeps, and after which step all ranks stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from lit_mnist.checkpoint.format import BEST, LAST, SECTION, write_serialized
from lit_mnist.checkpoint.serialization import plain_values, serialize
from lit_mnist.checkpoint.store import CheckpointFolder
from lit_mnist.distributed.consensus import Consensus
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.signals import STOP
from lit_mnist.errors import NonFiniteError, StoppedError
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.job import ExperimentJob

_STEPS_BETWEEN_TRACED = 50


class CheckpointManager:
    """Saves checkpoints, and keeps the newest ones and the best one. Without a validation split the newest is the best.

    A checkpoint is copied after its step and written in the background. The training waits for the copy, and for the
    previous write if it is not complete. At the end of its context the manager waits for the last write.

    Args:
        job: The job.
        rank: This rank.
        net: The bare network.
        save: Called on every rank to save: creates a checkpoint and, on rank 0, passes it to `write`.
        step: Optimizer steps before a resume.
        check_finite: Called before each save; raises NonFiniteError on all ranks if an earlier step was not finite.

    Attributes:
        best: The best validation score so far; negative if there is none.
    """

    def __init__(
        self,
        job: ExperimentJob,
        rank: Rank,
        net: nn.Module,
        save: Callable[[], None],
        *,
        step: int = 0,
        check_finite: Callable[[], None] = lambda: None,
    ) -> None:
        self.job, self.rank, self.net, self.save, self.check_finite = job, rank, net, save, check_finite
        self.folder = job.folder / "checkpoints"
        self.best = -1.0
        run = job.experiment.run
        # Fixed if a trace counts the collectives of a step.
        steps = _STEPS_BETWEEN_TRACED if run.trace in {"steps", "traffic"} else None
        self._consensus = Consensus(rank, job.devices.of(rank), steps)
        self._step = step
        self._saved_at = time.monotonic()
        last_is_valid = job.checkpoint is not None and job.checkpoint.resolve() == (self.folder / LAST).resolve()
        self._files = CheckpointFolder(self.folder, keep=run.keep, last_step=step if last_is_valid else None)
        self._is_best = False
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def resume(self, best: float) -> None:
        """Restores the best score of a resumed run, unless its best checkpoint was damaged and removed."""
        if (self.folder / BEST).exists():
            self.best = best

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.wait()
            return
        with suppress(Exception):
            self.wait()
        if isinstance(error, NonFiniteError) and self.rank.world_size > 1:
            # All ranks raise it. A rank that exits before the write is complete would end rank 0.
            dist.barrier()

    def on_step_end(self, step: int, *, ends_epoch: bool) -> None:
        """Saves if a checkpoint is due, and stops if a rank has received a signal, except at the end of an epoch.

        Raises:
            StoppedError: A rank has received a signal. All ranks raise it after the same step, which is saved.
        """
        self._step = step
        if self._writing and self._writing.done():
            self.wait()
        if ends_epoch:
            return
        run = self.job.experiment.run
        late = run.save_seconds is not None and time.monotonic() - self._saved_at >= run.save_seconds
        decision = self._consensus.on_step_end(step, STOP.received_signal, save=late and self.rank.is_first)
        if decision.save or decision.stop or (run.save_steps and step % run.save_steps == 0):
            self._save()
        if decision.stop:
            self._stop(decision.stop)

    def update_best(self, validation: Evaluation | None) -> bool:
        """Updates the best score, and returns whether the epoch that ends is the best so far."""
        # Until the first validation, the newest weights are the best.
        self._is_best = validation.score > self.best if validation else self.best < 0
        if validation and self._is_best:
            self.best = validation.score
        return self._is_best

    def on_epoch_end(self, step: int, show: Callable[[], None] = lambda: None) -> None:
        """Saves at the end of an epoch, after `update_best`, and stops if a rank has received a signal.

        Args:
            step: Optimizer steps so far.
            show: Prints the epoch. It is called after the save, so that a blocked terminal does not delay the save.

        Raises:
            StoppedError: See `on_step_end`.
        """
        self._step = step
        self._save()
        show()
        decision = self._consensus.decide(self._step, STOP.received_signal)
        if decision.stop:
            self._stop(decision.stop)

    def write(self, checkpoint: Mapping[str, Any]) -> None:
        """Copies a checkpoint and starts to write it; only rank 0 calls it.

        Raises:
            InputError: The previous checkpoint could not be written.
        """
        # The section of a run consists of plain values that do not change.
        content = {key: part if key == SECTION else plain_values(part, copy=True) for key, part in checkpoint.items()}
        self.wait()

        def write(path: Path) -> None:
            write_serialized(path, serialize(content))

        self._writing = self._writer.submit(self._files.put, write, self._step, is_best=self._is_best)

    def wait(self) -> None:
        """Waits until the last checkpoint is on the disk.

        Raises:
            InputError: The checkpoint could not be written.
        """
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()

    def _save(self) -> None:
        self.check_finite()
        weights = [weight.detach() for weight in self.net.parameters()]
        # A single read of the largest value checks all weights.
        if not math.isfinite(float(get_total_norm(weights, math.inf))):
            raise NonFiniteError(f"A weight was not finite after step {self._step}, which is not saved: lower --lr.")
        self.save()
        self._is_best = False
        self._saved_at = time.monotonic()

    def _stop(self, signum: signal.Signals) -> None:
        self.wait()
        if self.rank.world_size > 1:
            # A rank that exits before the checkpoint is written would end rank 0.
            dist.barrier()
        raise StoppedError(f"Stopped by {signum.name} after step {self._step}.", signum)
