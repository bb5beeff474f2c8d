"""The run folder, which one run locks at a time, and the only place that the run writes to."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml

from lit_mnist.checkpoint.atomic_io import remove_temporary_files, write_text
from lit_mnist.checkpoint.store import CONFIG
from lit_mnist.distributed.file_lock import open_lock, try_lock
from lit_mnist.distributed.rank_status import LAUNCHER_FOLDER
from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.errors import InputError

RESULT, METRICS, REPORT = "result.json", "metrics.csv", "report.html"
# Bytes that must be free at the start of a run.
_LEAST_FREE = 1 << 20
_LOCK = "run.lock"
# A file with the run ID of torchrun, which all restarts of a job share.
_RUN_ID = "torchelastic-run-id"


class RunFolder:
    """A locked run folder. The kernel releases the lock when the last process of the run ends.

    Args:
        path: The folder.
        lock: The open lock file, if this process or its parent has locked the folder.
    """

    def __init__(self, path: Path, lock: IO[str] | None = None) -> None:
        self.path = path
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @classmethod
    def claim(
        cls,
        path: Path,
        *,
        writes: tuple[str, ...],
        folders: tuple[str, ...] = (),
        resumed: bool = False,
        patience: float = 0,
        lock: IO[str] | None = None,
    ) -> RunFolder:
        """Locks the folder, and creates it if it does not exist.

        Args:
            path: The folder.
            writes: Files that the run will write; they must not exist unless the run is resumed.
            folders: Subfolders to create in addition to `logs`.
            resumed: Whether the run resumes in its own folder.
            patience: Seconds to wait for another process to release the lock.
            lock: The open lock file, if this process has already locked the folder.

        Raises:
            InputError: The folder cannot be written, is locked by another run, or contains another run.
        """
        lock = lock or lock_folder(path, patience)
        present = [name for name in writes if (path / name).exists()]
        if present and not resumed:
            lock.close()
            raise InputError(
                f"The run folder {path} holds a run already ({', '.join(present)}): choose another --run-dir."
            )
        try:
            for name in ("logs", *folders):
                (path / name).mkdir(exist_ok=True)
                with tempfile.TemporaryFile(dir=path / name) as probe:
                    probe.write(bytes(_LEAST_FREE))
        except OSError as error:
            lock.close()
            raise InputError(f"The run folder {path} cannot be written: {error.strerror}.") from error
        lock.seek(0)
        if before := lock.read().strip():
            print_line(f"note: the run before this one in {display_path(path)} ({before}) was killed")
        remove_temporary_files(path)
        remove_temporary_files(path / "checkpoints")
        for left in (path / "logs").glob(f"{LAUNCHER_FOLDER}*"):
            shutil.rmtree(left, ignore_errors=True)
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        lock.flush()
        if run_id := _elastic_run_id():
            write_text(path / "logs" / _RUN_ID, run_id)
        return cls(path, lock)

    def release(self) -> None:
        """Records that the run was not killed. The lock is released when the process ends."""
        if self._lock:
            self._lock.seek(0)
            self._lock.truncate()
            self._lock.flush()

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the resolved configuration to `config.yaml`."""
        write_text(self.path / CONFIG, yaml.safe_dump(config, sort_keys=False))

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes `result.json`. A metric that is not a number becomes null: JSON cannot represent it."""
        valid = json.loads(json.dumps(result), parse_constant=lambda _: None)
        write_text(self.path / RESULT, json.dumps(valid, indent=2, allow_nan=False) + "\n")


def lock_folder(path: Path, patience: float = 0) -> IO[str]:
    """Creates and locks a folder, and returns the lock file. Closing the file releases the lock.

    Raises:
        InputError: The folder cannot be created, or another process has locked it for longer than `patience` seconds.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path / _LOCK)
    except OSError as error:
        raise InputError(f"The run folder {path} cannot be written: {error.strerror}.") from error
    try:
        deadline, waits = time.monotonic() + patience, False
        while not try_lock(lock):
            if time.monotonic() >= deadline:
                raise InputError(f"The run folder {path} is in use by {_holder(lock)}: choose another --run-dir.")
            if not waits:
                print_line(f"note: waiting for {_holder(lock)}, which holds {display_path(path)}")
            waits = True
            time.sleep(0.2)
    except OSError as error:
        lock.close()
        raise InputError(
            f"The run folder {path} cannot be locked: {error.strerror}. Choose a --run-dir on another file system."
        ) from error
    except BaseException:
        lock.close()
        raise
    return lock


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip() or "another process"


def default_path(name: str, *, make: bool = False) -> Path:
    """Returns `runs/<time>-<name>`, with a number if the folder exists.

    Args:
        name: Last part of the name of the folder.
        make: Whether to create the folder, so that no other run can use it.
    """
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    candidate, number = stem, 1
    while True:
        try:
            if make:
                candidate.mkdir(parents=True)
            if make or not candidate.exists():
                return candidate
        except FileExistsError:
            pass
        except OSError as error:
            raise InputError(f"The run folder {candidate} cannot be written: {error.strerror}.") from error
        number += 1
        candidate = stem.with_name(f"{stem.name}-{number}")


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
