"""Chooses the checkpoint that a command starts from, by one rule for the experiment and for a user's module.

The folder of a resumed training run is locked before its newest checkpoint is chosen: an earlier run may still save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from lit_mnist.checkpoint.format import LAST, find_checkpoint, find_weights
from lit_mnist.checkpoint.saved import Saved
from lit_mnist.checkpoint.store import find_newest_valid, find_run_folder
from lit_mnist.distributed.rank import Rank, launched_from_outside, print_once, warn_once
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import InputError
from lit_mnist.run.folder import RunFolder, was_restarted
from lit_mnist.run.folder_lock import FolderLock

# A lost rank may still hold the folder when its successor starts.
PATIENCE_SECONDS = 30.0

AnySaved = TypeVar("AnySaved", bound=Saved)


class Start(Protocol):
    """What a request says about where it starts, and where it writes."""

    @property
    def command(self) -> str:
        """The command, such as `fit`."""

    @property
    def trains(self) -> bool:
        """Whether the command trains."""

    @property
    def run_dir(self) -> str | None:
        """The run folder."""

    @property
    def resume(self) -> str | None:
        """The run folder or checkpoint to resume from; `auto` resumes from `run_dir` if it contains a checkpoint."""

    @property
    def checkpoint(self) -> str | None:
        """The run folder or checkpoint to evaluate."""


def resumes_in_place(start: Start) -> bool:
    """Returns whether a training run resumes from what it finds in `run.dir`: `--resume auto`, or after a restart."""
    return start.run_dir is not None and (start.resume == "auto" or was_restarted(Path(start.run_dir)))


def writes_run_folder() -> bool:
    """Returns whether this process writes the run folder."""
    return not launched_from_outside() or Rank.from_environment().is_first


@contextmanager
def lock_resumed_folder(start: Start) -> Iterator[FolderLock | None]:
    """Locks the run folder in which a training run resumes, and yields the lock; undoes it if the body raises.

    Yields None if there is nothing to lock: for a new training, a folder without checkpoints, and on a process that
    does not write.

    Raises:
        InputError: Another run holds the folder, or it cannot be locked.
    """
    folder = _folder_to_resume(start) if writes_run_folder() else None
    if folder is None:
        yield None
        return
    lock = FolderLock(folder, PATIENCE_SECONDS if resumes_in_place(start) else 0)
    try:
        yield lock
    except BaseException:
        lock.undo()
        raise


def find_saved(start: Start, read: Callable[[Path], AnySaved]) -> AnySaved | None:
    """Returns the checkpoint that a request names or its run folder contains; None begins a new training.

    Args:
        start: The request.
        read: Reads and verifies a file. For a command that does not train it must accept a file without a hash.

    Raises:
        InputError: The checkpoint is missing, damaged or not given.
    """
    if not start.trains:
        if not start.checkpoint:
            raise InputError(f"{start.command} needs --ckpt RUN_DIR_OR_CKPT: the trained weights.")
        return read(find_weights(Path(start.checkpoint), print_once))
    if start.resume == "auto" and not start.run_dir:
        raise InputError("--resume auto resumes in the folder of --run-dir: give --run-dir.")
    if resumes_in_place(start):
        folder = Path(str(start.run_dir))
        if found := find_newest_valid(folder, warn_once):
            return read(found.path)
        if list(folder.glob("checkpoints/*.ckpt")):
            raise InputError(f"The folder {folder} contains no valid checkpoint: move the others away to start again.")
    if start.resume in {None, "auto"}:
        return None
    source = Path(str(start.resume))
    if not source.is_dir():
        return read(find_checkpoint(source, (LAST,)))
    if found := find_newest_valid(source, warn_once):
        return read(found.path)
    raise InputError(f"The folder {source} contains no valid checkpoint to resume from.")


def report_resume(saved: Saved) -> None:
    """Prints which checkpoint a training run resumes from."""
    print_once(f"note: resuming from {display_path(saved.path.absolute())} after step {saved.step}")


def origin_of(start: Start, saved: Saved | None) -> Path | None:
    """Returns the run folder of the training that is resumed, or None."""
    return find_run_folder(saved.path) if saved and start.trains else None


def checkpoint_to_read(start: Start, saved: Saved | None, folder: RunFolder | None) -> Path | None:
    """Returns the checkpoint that the ranks read: a copy if it belongs to another run, which may change it."""
    if saved is None:
        return None
    if not start.trains or folder is None or launched_from_outside() or saved.is_in(folder.checkpoints):
        return saved.path.absolute()
    return folder.checkpoints / LAST


def _folder_to_resume(start: Start) -> Path | None:
    """Returns the run folder in which a training run resumes, or None if it writes to a new one."""
    if not start.trains:
        return None
    if resumes_in_place(start):
        folder = Path(str(start.run_dir))
        return folder.absolute() if (folder / "checkpoints").is_dir() else None
    if start.resume in {None, "auto"}:
        return None
    source = Path(str(start.resume))
    try:
        # A run folder, its `checkpoints` folder, or a file in it.
        inside = [source / "checkpoints" / LAST, source / LAST] if source.is_dir() else [source]
        origin = next(filter(None, map(find_run_folder, inside)), None)
        return origin if origin and (start.run_dir is None or Path(start.run_dir).resolve() == origin) else None
    except (OSError, RuntimeError):
        # For example, a link to itself: reading the checkpoint reports it.
        return None
