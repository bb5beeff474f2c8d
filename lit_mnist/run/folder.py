"""The run folder, which one run locks at a time, and the only place that the run writes to."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml

from lit_mnist.checkpoint.atomic_io import remove_temporary_files, write_text
from lit_mnist.checkpoint.store import CONFIG
from lit_mnist.distributed.rank_status import LAUNCHER_FOLDER
from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.errors import InputError
from lit_mnist.run.folder_lock import FolderLock

RESULT, METRICS, REPORT = "result.json", "metrics.csv", "report.html"
# Bytes that must be free at the start of a run.
_LEAST_FREE = 1 << 20
# A file with the run ID of torchrun, which all restarts of a job share.
_RUN_ID = "torchelastic-run-id"


class RunFolder:
    """A locked run folder.

    Args:
        path: The folder.
        lock: Its lock, if this process or its parent has locked the folder.
    """

    def __init__(self, path: Path, lock: FolderLock | None = None) -> None:
        self.path = path
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @classmethod
    def claim(
        cls,
        path: Path | None,
        *,
        writes: tuple[str, ...],
        name: str = "",
        folders: tuple[str, ...] = (),
        resumed: bool = False,
        patience: float = 0,
        lock: FolderLock | None = None,
    ) -> RunFolder:
        """Locks the folder, and creates it if it does not exist.

        Args:
            path: The folder, or None for a new one in `runs`.
            writes: Files that the run will write; they must not exist unless the run is resumed.
            name: Last part of the name of a new folder.
            folders: Subfolders to create in addition to `logs`.
            resumed: Whether the run resumes in its own folder.
            patience: Seconds to wait for another process to release the lock.
            lock: The lock of the folder, if this process has already locked it.

        Raises:
            InputError: The folder cannot be written, is locked by another run, or contains another run.
        """
        lock = lock or (FolderLock(path, patience) if path else _lock_new(name))
        path = lock.path
        try:
            present = [written for written in writes if (path / written).exists()]
            if present and not resumed:
                raise InputError(
                    f"The run folder {path} holds a run already ({', '.join(present)}): choose another --run-dir."
                )
            for place in (path / "logs", *(path / folder for folder in folders)):
                place.mkdir(exist_ok=True)
                with tempfile.TemporaryFile(dir=place) as probe:
                    probe.write(bytes(_LEAST_FREE))
            if lock.killed:
                print_line(f"note: the run before this one in {display_path(path)} ({lock.killed}) was killed")
            remove_temporary_files(path)
            remove_temporary_files(path / "checkpoints")
            for left in (path / "logs").glob(f"{LAUNCHER_FOLDER}*"):
                shutil.rmtree(left, ignore_errors=True)
            if run_id := _elastic_run_id():
                write_text(path / "logs" / _RUN_ID, run_id)
        except OSError as error:
            lock.undo()
            raise InputError(f"The run folder {path} cannot be written: {error.strerror}.") from error
        except InputError:
            lock.undo()
            raise
        return cls(path, lock)

    def release(self) -> None:
        """Records that the run was not killed. The lock is released when the process ends."""
        if self._lock:
            self._lock.release()

    def undo(self) -> None:
        """Restores the folder to its state before it was locked, because the run is rejected."""
        if self._lock:
            self._lock.undo()

    def saved(self) -> dict[str, int]:
        """Returns the names of the checkpoints with the times at which they were saved."""
        return {path.name: path.stat().st_mtime_ns for path in self.checkpoints.glob("*.ckpt")}

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the resolved configuration to `config.yaml`."""
        write_text(self.path / CONFIG, yaml.safe_dump(config, sort_keys=False))

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes `result.json`. A metric that is not a number becomes null: JSON cannot represent it."""
        valid = json.loads(json.dumps(result), parse_constant=lambda _: None)
        write_text(self.path / RESULT, json.dumps(valid, indent=2, allow_nan=False) + "\n")


def default_path(name: str) -> Path:
    """Returns `runs/<time>-<name>`, with a number if the folder exists."""
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    others = (stem.with_name(f"{stem.name}-{number}") for number in count(2))
    return next(path for path in chain([stem], others) if not os.path.lexists(path))


def _lock_new(name: str) -> FolderLock:
    while True:
        with suppress(FileExistsError):
            return FolderLock(default_path(name).absolute(), new=True)


def result_steps(path: Path) -> int | None:
    """Returns the optimizer steps in the result of a run folder, or None if it has no result that states them."""
    try:
        steps = json.loads((path / RESULT).read_text())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def was_restarted(path: Path) -> bool:
    """Returns whether torchrun has restarted this process, and its predecessor used the run folder."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return True
    # torchrun does not count the restarts that follow the loss of ranks on another machine.
    run_id = _elastic_run_id()
    if run_id is None or (path / RESULT).exists():
        return False
    with suppress(OSError):
        return (path / "logs" / _RUN_ID).read_text(errors="replace") == run_id
    return False


def _elastic_run_id() -> str | None:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if run_id == "none" else run_id
