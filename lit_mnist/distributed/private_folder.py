"""The private folder of a launch, which only this user can enter and in which its processes exchange files."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lit_mnist.errors import InputError

# The variable that holds the folder's path in the ranks.
VARIABLE = "LIT_MNIST_PRIVATE_FOLDER"
_PREFIX = "lit_mnist-"
_LOCK = "lock"
# Bytes; Linux accepts 107, other systems a few less.
_LONGEST_SOCKET_PATH = 100


@dataclass(frozen=True)
class PrivateFolder:
    """The private folder of a running launch.

    Attributes:
        path: The folder.
        temporary: The user's temporary folder, which ranks must restore since they are forked in `temporary_files_in`.
        launcher: The launcher's process ID.
    """

    path: Path
    temporary: str
    launcher: int

    def enter(self) -> None:
        """Sets up this process, a rank: exports the folder and restores the user's temporary folder."""
        os.environ[VARIABLE] = str(self.path)
        tempfile.tempdir = self.temporary


@contextmanager
def private_folder() -> Iterator[PrivateFolder]:
    """Creates a folder with mode 0700 and removes it at the end. Also removes the folders that killed launchers left.

    The folder is in the system's temporary folder, since the run folder may be on a network file system.

    Raises:
        InputError: The folder cannot be created.
    """
    try:
        _remove_abandoned()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    except OSError as error:
        raise InputError(
            f"No temporary folder can be created ({error}): set TMPDIR to a folder that you can write to."
        ) from error
    try:
        with (path / f"{_LOCK}.new").open("w") as lock:
            # The kernel holds the lock until the last process of the launch has exited. The file gets its name after
            # it is locked, so that no other launcher finds it unlocked.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
                (path / f"{_LOCK}.new").rename(path / _LOCK)
            yield PrivateFolder(path, tempfile.gettempdir(), os.getpid())
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid() and not path.is_symlink():
                with (path / _LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)


def launch_private_folder() -> Path | None:
    """Returns the private folder of this rank's launch, or None under an external launcher."""
    ours = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_PREFIX)
    return Path(os.environ[VARIABLE]) if ours and VARIABLE in os.environ else None


def run_id() -> str:
    """Returns the ID of a launch by this process."""
    return f"{_PREFIX}{os.getpid()}"


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Makes `folder` the temporary folder of this process and of the processes that it forks in the body."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def socket_path(folder: Path, name: str) -> Iterator[str]:
    """Yields a path of `folder / name` that is short enough for a Unix socket."""
    path = str(folder / name)
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
