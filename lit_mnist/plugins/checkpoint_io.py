"""Checkpoints that survive a crash, a full disk and a flipped bit, for any checkpoint callback."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.checkpoint.file_hash import DamagedError, hashed_file, verify_hash
from lit_mnist.errors import InputError, require

_LOG = logging.getLogger("lightning.pytorch")


class VerifiedCheckpointIO(CheckpointIO):
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
        self._warned: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint.

        Raises:
            InputError: The checkpoint has a value that cannot be loaded with `weights_only=True`, or it, or the one
                before, cannot be written. The file that was there remains.
        """
        require(storage_options is None, "VerifiedCheckpointIO has no storage_options.")
        path = _local(path)
        self.wait()
        content = _serialize(checkpoint)
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
        require(path.is_file(), f"There is no checkpoint file at {path}.")
        try:
            with path.open("rb") as file:
                hashed = verify_hash(file)
                file.seek(0)
                checkpoint: dict[str, Any] = torch.load(file, map_location=map_location or "cpu", weights_only=True)
        except DamagedError as error:
            raise InputError(f"The checkpoint {path} is damaged: {error}. Use another checkpoint.") from error
        except OSError as error:
            raise InputError(f"The checkpoint {path} cannot be read: {error.strerror or error}.") from error
        except Exception as error:
            raise InputError(_reason_not_loaded(path, error)) from error
        if not hashed and path not in self._warned:
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
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def teardown(self) -> None:
        """Waits for the writer at the end of a fit.

        Raises:
            InputError: The last checkpoint could not be written.
        """
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
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "checkpoint")
        before = self._pending
        self._pending = self._executor.submit(_after, before, work)


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


def _reason_not_loaded(path: Path, error: Exception) -> str:
    try:
        classes = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        classes = []
    if classes:
        return (
            f"The checkpoint {path} needs {', '.join(classes)}, which weights_only=True does not load. If you trust "
            "the file, allow them with torch.serialization.add_safe_globals."
        )
    return f"The checkpoint {path} is damaged or not a checkpoint ({type(error).__name__}). Use another checkpoint."


def _write(path: Path, content: memoryview) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.writelines(hashed_file(content))
    except OSError as error:
        raise InputError(
            f"The checkpoint {path} could not be written ({error.strerror}). The file that was there remains."
        ) from error


def _serialize(checkpoint: Mapping[str, Any]) -> memoryview:
    """Returns the bytes of torch.save, which `weights_only=True` can load.

    Raises:
        InputError: There is a value that it cannot load; the message names it.
    """
    content = _loadable(checkpoint)
    if content is None:
        place, value = _find_rejected(checkpoint, "checkpoint")
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise InputError(
            f"{place} is a {kind}, which cannot be loaded with weights_only=True. Save plain values and tensors "
            "instead, or allow its class, and the classes of its attributes, with "
            "torch.serialization.add_safe_globals."
        )
    return content


def _loadable(value: Any) -> memoryview | None:
    """Returns the bytes of torch.save, or None if they cannot be written, or not loaded with `weights_only=True`."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        try:
            # Reads no tensor's bytes, which takes a hundredth of the time.
            torch.load(content, map_location="meta", weights_only=True)
        except NotImplementedError:
            # Sparse tensors cannot be loaded so.
            content.seek(0)
            torch.load(content, map_location="cpu", weights_only=True)
    except Exception:
        return None
    return content.getbuffer()


def _find_rejected(value: Any, place: str) -> tuple[str, Any]:
    """Returns the innermost part that cannot be loaded, and where it is."""
    parts: Iterable[tuple[Any, Any]] = ()
    if type(value) in {list, tuple}:
        parts = enumerate(value)
    elif isinstance(value, Mapping):
        parts = value.items()
    for key, part in parts:
        if _loadable(key) is None:
            return f"A key of {place}", key
        if _loadable(part) is None:
            return _find_rejected(part, f"{place}[{key!r}]")
    return place, value
