"""The run folder: claimed by one run at a time, and everything that the run leaves behind is in it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

import yaml

from lit_mnist.errors import InputError
from lit_mnist.training.files import write_text

CONFIG, RESULT, METRICS, REPORT = "config.yaml", "result.json", "metrics.csv", "report.html"
_LOCK = "run.lock"


class RunFolder:
    """A folder that this run holds until its processes have ended.

    The lock is the kernel's: it goes when the last process that inherited it ends, however it ended.

    Args:
        path: The folder.
        lock: The open lock file, where this process or its parent holds it.
    """

    def __init__(self, path: Path, lock: IO[str] | None = None) -> None:
        self.path = path
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of the ranks' logs."""
        return self.path / "logs"

    @classmethod
    def claim(
        cls, path: Path, *, writes: tuple[str, ...], folders: tuple[str, ...] = (), resumed: bool = False
    ) -> RunFolder:
        """Makes the folder where it does not exist, and holds it.

        Args:
            path: The folder.
            writes: Files that the run is going to write: refused where one is there already.
            folders: Folders to make in it, beside that of the logs.
            resumed: Whether the run goes on in a folder of its own, so that its files may be there.

        Raises:
            InputError: The folder cannot be made or written, another run holds it, or it holds another run's files.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = (path / _LOCK).open("a+")
        except OSError as error:
            raise InputError(f"The run folder {path} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise InputError(f"The run folder {path} is in use by {holder}: choose another --run-dir.") from error
        present = [name for name in writes if (path / name).exists()]
        if present and not resumed:
            lock.close()
            raise InputError(
                f"The run folder {path} holds a run already ({', '.join(present)}): choose another --run-dir."
            )
        try:
            for name in ("logs", *folders):
                (path / name).mkdir(exist_ok=True)
        except OSError as error:
            lock.close()
            raise InputError(f"The run folder {path} cannot be written: {error.strerror}: {error.filename}.") from error
        lock.seek(0)
        lock.truncate()
        lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        lock.flush()
        return cls(path, lock)

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the resolved configuration, usable as `--config`."""
        write_text(self.path / CONFIG, yaml.safe_dump(config, sort_keys=False))

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes `result.json`."""
        write_text(self.path / RESULT, json.dumps(result, indent=2) + "\n")


def shown(path: Path) -> str:
    """Returns a path as a user would type it here: relative where it lies below the working folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def default_path(name: str) -> Path:
    """Returns `runs/<time>-<name>`, numbered where two runs start within a second."""
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    candidate, number = stem, 1
    while candidate.exists():
        number += 1
        candidate = stem.with_name(f"{stem.name}-{number}")
    return candidate
