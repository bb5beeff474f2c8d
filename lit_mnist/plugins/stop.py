"""Stopping all ranks at one step, with a checkpoint."""

import signal
import threading
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lit_mnist.errors import StoppedError
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """Returns the signals that stop a training; under `nohup`, SIGHUP does not."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signum for signum in SIGNALS if not (signum == signal.SIGHUP and ignored)]


class StopTogether(Callback):
    """Ends a training at a signal: all ranks stop after the same step, whose checkpoint is saved.

    A Trainer that is interrupted saves nothing. Its SIGTERM handler calls a collective, which hangs if the other ranks
    did not get the signal at the same step:

        trainer = Trainer(callbacks=[ExactCheckpoint("checkpoints"), StopTogether()])

    Then `fit` raises StoppedError on every rank. A signal to one rank is enough; a second signal has no effect.

    Args:
        every_n_steps: Batches between two collectives in which the ranks agree; it is the longest wait.

    Attributes:
        received: The signal that this process has received, or 0.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        self.every_n_steps = every_n_steps
        self.received = 0
        self._batches = self._agreed = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the handlers, after those of the Trainer, which restores what was there before the fit."""
        self.received = self._batches = self._agreed = 0
        # Only a main thread may install handlers.
        for signum in heeded() if threading.current_thread() is threading.main_thread() else ():
            signal.signal(signum, self._receive)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops if any rank has received a signal.

        Raises:
            StoppedError: The checkpoint of this step is saved.
        """
        self._batches += 1
        if not self._agreed and (trainer.world_size == 1 or self._batches % self.every_n_steps == 0):
            received = torch.tensor(self.received, device=pl_module.device)
            self._agreed = int(trainer.strategy.reduce(received, reduce_op="max"))
        # A checkpoint that cannot be resumed exactly, such as that of an epoch's last batch, is not saved at once.
        exact = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ExactCheckpoint)]
        if self._agreed and all(each.save_now(trainer) for each in exact):
            raise StoppedError(self._agreed)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops after the last step."""
        if self._agreed:
            raise StoppedError(self._agreed)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
