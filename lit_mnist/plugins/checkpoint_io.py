"""Checkpoints that survive a crash, a full disk and a flipped bit, for any checkpoint callback."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from lit_mnist.checkpoint.format import read_verified, write_serialized
from lit_mnist.checkpoint.serialization import serialize
from lit_mnist.errors import InputError, require
from lit_mnist.plugins.not_callbacks import NotACallback

_LOG = logging.getLogger("lightning.pytorch")


class VerifiedCheckpointIO(CheckpointIO, NotACallback):
    """Writes each checkpoint atomically with a SHA-256, in the background, and verifies it on load.

    It works with `ModelCheckpoint` and any other callback, and with `Trainer.save_checkpoint`. A file is written to a
    temporary name, flushed to the disk, and renamed. It stays a file of `torch.save` that torch and Lightning can load.
    It is always loaded with `weights_only=True`; what that cannot load is rejected when it is saved:

        trainer = Trainer(plugins=[VerifiedCheckpointIO()], callbacks=[ModelCheckpoint(save_last=True)])

    Classes other than tensors and Python's plain types need `torch.serialization.add_safe_globals`. An error of the
    writer, such as a full disk, is logged at once, and raised at the next save or at the end of the fit. Until then, no
    older checkpoint is removed.

    Args:
        background: Whether training continues while a file is written. Its content is copied to memory before. After
            the end of a fit, each save is complete when it returns.
    """

    def __init__(self, background: bool = True) -> None:
        self.background = background
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._process = os.getpid()
        self._warned: set[Path] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a process that `ddp_spawn` starts needs: its writer is a thread of its own."""
        self.wait()
        return {**self.__dict__, "_executor": None}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint.

        Raises:
            InputError: The checkpoint has a value that cannot be loaded with `weights_only=True`, or it, or the one
                before, cannot be written. The file that was there remains.
        """
        require(storage_options is None, "VerifiedCheckpointIO has no storage_options.")
        path = _local(path)
        self.wait()
        content = serialize(checkpoint)
        self._run(lambda: _write(path, content))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns a verified checkpoint.

        Args:
            path: The file. A file without a hash, such as one of a stock Trainer, is loaded with a warning.
            map_location: As of `torch.load`; the CPU by default.
            weights_only: Must not be False.

        Raises:
            InputError: The file is missing, damaged, or has content that `weights_only=True` rejects.
        """
        require(weights_only is not False, "VerifiedCheckpointIO always loads with weights_only=True.")
        self.wait()
        path = _local(path)
        checkpoint, sha256 = read_verified(path, hashed=False, map_location=map_location or "cpu")
        if sha256 is None and path not in self._warned:
            self._warned.add(path)
            rank_zero_warn(f"The checkpoint {path} has no SHA-256: it was loaded, but not verified.")
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint after the save that is being written, and only if that succeeds."""
        self._run(lambda: _local(path).unlink(missing_ok=True))

    def wait(self) -> None:
        """Waits for the writer.

        Raises:
            InputError: The last checkpoint could not be written.
        """
        self._leave_parent()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def teardown(self) -> None:
        """Waits for the writer at the end of a fit.

        Raises:
            InputError: The last checkpoint could not be written.
        """
        self._leave_parent()
        failing = sys.exception() is not None
        executor, self._executor = self._executor, None
        self.background = False
        try:
            if executor is not None:
                executor.shutdown(wait=True)
            self.wait()
        except InputError:
            # Was logged by the writer, and must not hide the error that ends the fit.
            if not failing:
                raise

    def _run(self, work: Callable[[], None]) -> None:
        if not self.background:
            work()
            return
        self._leave_parent()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "checkpoint")
        before = self._pending
        self._pending = self._executor.submit(_after, before, work)

    def _leave_parent(self) -> None:
        """Forgets the writer of the process that this one was forked from, whose thread does not exist here."""
        if self._process != os.getpid():
            self._process, self._executor, self._pending = os.getpid(), None, None


def _after(before: Future[None] | None, work: Callable[[], None]) -> None:
    """Runs the writer's work unless the work before has failed, whose error is raised again."""
    if before is not None:
        before.result()
    try:
        work()
    except InputError as error:
        _LOG.error(str(error))
        raise


def _local(path: str | Path) -> Path:
    require("://" not in str(path), f"VerifiedCheckpointIO writes to local file systems, not to {path}.")
    return Path(path)


def _write(path: Path, content: memoryview) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {path.parent} cannot be written: {error.strerror}.") from error
    write_serialized(path, content)
