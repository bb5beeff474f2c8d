"""The private folder of a launch: what its processes leave there for each other is out of every other user's reach."""

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

# How the names of a launch by the project, and of its private folder, begin.
_OWN = "lit_mnist-"
_LOCK = "lock"
# The environment variable by which its ranks are told the folder.
VARIABLE = "LIT_MNIST_PRIVATE_FOLDER"
# Bytes; Linux takes 107, others a few less.
_LONGEST_SOCKET_PATH = 100


@dataclass(frozen=True)
class PrivateFolder:
    """A folder that only this user can enter, for the time of a launch.

    Attributes:
        path: The folder.
        temporary: The user's temporary folder, which a rank that was forked in `temporary_files_in` does not know.
        launcher: The launcher's process.
    """

    path: Path
    temporary: str
    launcher: int

    def enter(self) -> None:
        """Tells this process, a rank of the launch, where the folder is; its temporary files go where the user's go."""
        os.environ[VARIABLE] = str(self.path)
        tempfile.tempdir = self.temporary


@contextmanager
def private_folder() -> Iterator[PrivateFolder]:
    """Makes a folder with mode 0700 for the time of a launch, and removes it at the end.

    It is in the system's temporary folder and not in the run folder, which may be on a network file system. Those of
    launchers that were killed are removed here, too.

    Raises:
        InputError: No folder can be made there.
    """
    try:
        _remove_abandoned()
        path = Path(tempfile.mkdtemp(prefix=_OWN))
    except OSError as error:
        raise InputError(
            f"No temporary folder can be made ({error}): set TMPDIR to a folder that you can write to."
        ) from error
    try:
        with (path / f"{_LOCK}.new").open("w") as lock:
            # The kernel holds the lock until the last process of the launch has ended, however it ends. The name comes
            # last, so that no other launcher finds the file before it is locked.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
                (path / f"{_LOCK}.new").rename(path / _LOCK)
            yield PrivateFolder(path, tempfile.gettempdir(), os.getpid())
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned() -> None:
    """Removes this user's private folders of launches of which no process is left."""
    for path in Path(tempfile.gettempdir()).glob(f"{_OWN}*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid() and not path.is_symlink():
                with (path / _LOCK).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)


def own_private_folder() -> Path | None:
    """Returns the private folder of the launch that this process is a rank of; None where others have started it."""
    ours = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_OWN)
    return Path(os.environ[VARIABLE]) if ours and VARIABLE in os.environ else None


def run_id() -> str:
    """Returns the name of a launch by this process."""
    return f"{_OWN}{os.getpid()}"


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Lets Python's `tempfile` make its files in a folder: of this process, and of those forked meanwhile."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def socket_path(folder: Path, name: str) -> Iterator[str]:
    """Gives a path to a file of a folder that is short enough for a Unix socket, however long the folder's own is."""
    path = str(folder / name)
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
