"""The lock of a run folder, and what the folder contained before: a rejected run leaves it as it was."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from lit_mnist.checkpoint.atomic_io import atomic_file
from lit_mnist.distributed.file_lock import open_lock, try_lock
from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.errors import InputError

LOCK = "run.lock"
# What a run writes before its first step. Other files in the folder belong to others, who may write there meanwhile.
_FILES = ("config.yaml", "metrics.csv", "result.json", "report.html", LOCK)
_FOLDERS = ("logs", "checkpoints", "tensorboard", "model_checkpoints", "trace")
# Larger files, such as checkpoints, are not changed before the first step; a log grows.
_LARGEST = 1 << 20
_SECONDS_TO_END = 5


class FolderLock:
    """A locked run folder, which is created if it does not exist. The kernel releases the lock when its holders end.

    Args:
        path: The folder.
        patience: Seconds to wait for another process to release the lock.
        new: Whether the folder must be new.

    Attributes:
        path: The folder.
        killed: The process that held the lock before and did not release it, or an empty text.

    Raises:
        FileExistsError: The folder exists, but must be new.
        InputError: The folder cannot be created, or another process has locked it for longer than `patience` seconds.
    """

    def __init__(self, path: Path, patience: float = 0, *, new: bool = False) -> None:
        self.path, self._created = path, list[Path]()
        self._file: IO[str] | None = None
        self._before: FolderSnapshot | None = None
        try:
            self._make_folders(new=new)
            had_lock = os.path.lexists(path / LOCK)
            self._file = self._wait(time.monotonic() + patience)
            self._before = FolderSnapshot(path, had_lock=had_lock)
            if not self._before.is_empty:
                # Another process was faster, and its run has ended.
                self._created = []
            self.killed = _holder(self._file)
            self._write(
                f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            )
        except BaseException as error:
            self.undo()
            if not isinstance(error, OSError) or (new and os.path.lexists(path)):
                raise
            raise InputError(f"The run folder {path} cannot be written: {error.strerror}.") from error

    def release(self) -> None:
        """Records that the run was not killed. The lock is released when the process ends."""
        if self._file:
            self._write("")

    def undo(self) -> None:
        """Restores the folder to its state before the lock, and releases the lock."""
        if self._file:
            if self._created:
                shutil.rmtree(self.path, ignore_errors=True)
            elif self._before:
                self._before.restore()
            self._file.close()
        for folder in reversed(self._created):
            with suppress(OSError):
                folder.rmdir()
        self._file, self._created = None, []

    def _make_folders(self, *, new: bool) -> None:
        """Creates the folder and its parents, and remembers those that no other process has created."""
        for folder in (*reversed(self.path.absolute().parents), self.path.absolute()):
            try:
                folder.mkdir()
                self._created.append(folder)
            except OSError:
                if not folder.is_dir() or (new and folder == self.path.absolute()):
                    raise

    def _wait(self, deadline: float) -> IO[str]:
        """Returns the locked file."""
        waits = False
        file = open_lock(self.path / LOCK)
        try:
            while not self._try_lock(file):
                holder = _holder(file) or _locker(file)
                if time.monotonic() >= deadline + _SECONDS_TO_END * _has_ended(holder):
                    raise InputError(f"The run folder {self.path} is in use by {holder}: choose another --run-dir.")
                if not waits:
                    print_line(f"note: waiting for {holder}, which holds {display_path(self.path)}")
                waits = True
                time.sleep(0.2)
        except BaseException:
            file.close()
            raise
        if _is_named(file, self.path / LOCK):
            return file
        # The process that created it was rejected, and has removed it.
        file.close()
        self._make_folders(new=False)
        return self._wait(deadline)

    def _try_lock(self, file: IO[str]) -> bool:
        try:
            return try_lock(file)
        except OSError as error:
            if self._created:
                # No other process can lock it either.
                (self.path / LOCK).unlink(missing_ok=True)
            raise InputError(
                f"The run folder {self.path} cannot be locked: {error.strerror}. Choose a --run-dir on another file "
                "system."
            ) from error

    def _write(self, text: str) -> None:
        assert self._file
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()


class FolderSnapshot:
    """What a run folder contains, so that a rejected run can be undone.

    Args:
        path: The folder.
        had_lock: Whether it had a lock file.
    """

    def __init__(self, path: Path, *, had_lock: bool) -> None:
        self._path = path.absolute()
        self._files = {
            file: (file.lstat(), _content(file)) for file in _written(self._path) if file.name != LOCK or had_lock
        }

    @property
    def is_empty(self) -> bool:
        """Whether the folder contains nothing."""
        return not self._files and {file.name for file in self._path.iterdir()} <= {LOCK}

    def restore(self) -> None:
        """Removes what a run has created since, and restores the content and the times of every file."""
        new = {file for file in _written(self._path) if file not in self._files}
        places = {file.lstat().st_ino: file for file in new}
        for file, (stat, _) in self._files.items():
            # A checkpoint that was renamed.
            if not os.path.lexists(file) and (place := places.get(stat.st_ino)):
                place.rename(file)
                new.discard(place)
        for file in sorted(new, reverse=True):
            with suppress(OSError):
                file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        for file, (stat, content) in reversed(self._files.items()):
            with suppress(OSError):
                _restore(file, stat, content)


def _written(folder: Path) -> Iterator[Path]:
    """Yields the files and folders that a run writes, each folder before what it contains."""
    for name in (*_FILES, *_FOLDERS):
        if os.path.lexists(folder / name):
            yield folder / name
        for place, folders, files in os.walk(folder / name):
            for each in (*folders, *files):
                yield Path(place) / each


def _content(file: Path) -> bytes | None:
    with suppress(OSError):
        if file.is_file() and not file.is_symlink() and file.stat().st_size <= _LARGEST:
            return file.read_bytes()
    return None


def _restore(file: Path, before: os.stat_result, content: bytes | None) -> None:
    now = file.lstat() if os.path.lexists(file) else None
    if now and (now.st_ino, now.st_size, now.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns):
        return
    if content is not None and (now is None or now.st_ino != before.st_ino):
        with atomic_file(file) as restored:
            restored.write(content)
        file.chmod(before.st_mode)
    elif content is not None:
        file.write_bytes(content)
    elif now and file.is_file() and now.st_size > before.st_size:
        os.truncate(file, before.st_size)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _is_named(file: IO[str], path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _locker(file: IO[str]) -> str:
    """Returns the process that has locked a file without a name in it, because its run has just ended."""
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and fields[-3].endswith(f":{os.fstat(file.fileno()).st_ino}"):
                return f"process {fields[-4]}"
    return "another process"


def _has_ended(holder: str) -> bool:
    """Returns whether a process of this machine has ended, so that only its ranks hold the lock, which end with it."""
    named = re.match(rf"process (\d+) on {re.escape(socket.gethostname())},", holder)
    return named is not None and not Path("/proc", named[1]).exists()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()
