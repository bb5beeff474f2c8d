"""Which checkpoints a training keeps, when it saves them, and where it stops: at the same step on all ranks."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from lit_mnist.checkpoint.format import BEST, LAST, plain_values
from lit_mnist.checkpoint.store import CheckpointFolder
from lit_mnist.distributed.consensus import Consensus
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.signals import STOP
from lit_mnist.errors import NonFiniteError, StoppedError
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.job import Job

_STEPS_BETWEEN_TRACED = 50


class CheckpointManager:
    """Keeps the newest checkpoints and the best; without a validation split the newest is the best.

    A checkpoint is copied at its step and written in the background: the training waits for the copy only, or for the
    write before where that is not yet done.

    As a context of the training it waits at the end until everything is on the disk; engines that save at an epoch's
    end only call `wait`.

    Args:
        job: The job.
        rank: This rank.
        net: The bare network.
        save: Makes a checkpoint of the training's state, on rank 0 at least, and passes it to `write` there.
        step: Optimizer steps made before, where a run is resumed.
        check_finite: Called before each save; raises NonFiniteError on all ranks if an earlier step was not finite.

    Attributes:
        best: The best score on the validation split so far; below 0 for none.
    """

    def __init__(
        self,
        job: Job,
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
        # Fixed, where the collectives of a step are counted.
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
        """Takes the best score of a run that goes on, unless its checkpoint was damaged and is gone."""
        if (self.folder / BEST).exists():
            self.best = best

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Waits until what was saved is on the disk, also where the training ends by an error."""
        if error is None:
            self.wait()
            return
        with suppress(Exception):
            self.wait()
        if isinstance(error, NonFiniteError) and self.rank.world_size > 1:
            # All ranks raise it: one that ended before the write is done would take rank 0 with it.
            dist.barrier()

    def on_step_end(self, step: int, *, ends_epoch: bool) -> None:
        """Saves after a step where it is due, and stops where a signal has come; at an epoch's end `on_epoch_end` does.

        Raises:
            StoppedError: A signal has come to some rank; all ranks raise it after the same step, which is saved.
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
        """Returns whether an epoch that ends is the best so far."""
        # Before the first validation, and without any, the newest weights are the best that are known.
        self._is_best = validation.score > self.best if validation else self.best < 0
        if validation and self._is_best:
            self.best = validation.score
        return self._is_best

    def on_epoch_end(self, step: int, show: Callable[[], None] = lambda: None) -> None:
        """Saves the epoch that ends, once it was judged, and stops where a signal has come.

        Args:
            step: Optimizer steps made.
            show: Shows the epoch. It is called after the save, so that a terminal that takes nothing delays no save.

        Raises:
            StoppedError: As of `on_step_end`.
        """
        self._step = step
        self._save()
        show()
        decision = self._consensus.settle(self._step, STOP.received_signal)
        if decision.stop:
            self._stop(decision.stop)

    def write(self, checkpoint: Mapping[str, Any]) -> None:
        """Copies a checkpoint and begins to write it; on rank 0 only.

        Raises:
            InputError: The one before it could not be written.
        """
        content = plain_values(checkpoint, copy=True)
        self.wait()
        self._writing = self._writer.submit(self._files.put, content, self._step, is_best=self._is_best)

    def wait(self) -> None:
        """Waits until what was saved is on the disk.

        Raises:
            InputError: It could not be written.
        """
        if self._writing:
            writing, self._writing = self._writing, None
            writing.result()

    def _save(self) -> None:
        self.check_finite()
        weights = [weight.detach() for weight in self.net.parameters()]
        # One read of the largest value checks all of them.
        if not math.isfinite(float(get_total_norm(weights, math.inf))):
            raise NonFiniteError(f"A weight was not finite after step {self._step}, which is not saved: lower --lr.")
        self.save()
        self._is_best = False
        self._saved_at = time.monotonic()

    def _stop(self, signum: signal.Signals) -> None:
        self.wait()
        if self.rank.world_size > 1:
            # A rank that ended before the checkpoint is written would take rank 0 with it.
            dist.barrier()
        raise StoppedError(f"Stopped by {signum.name} after step {self._step}.", signum)
