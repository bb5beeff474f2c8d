"""The private folder of a launch: what its processes leave there for each other is out of every other user's reach."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_mnist.errors import InputError

# The environment variable by which the project's launchers tell their ranks the folder.
VARIABLE = "LIT_MNIST_PRIVATE_FOLDER"
# Bytes; Linux takes 107, others a few less.
_LONGEST_SOCKET_PATH = 100


@contextmanager
def private_folder() -> Iterator[Path]:
    """Makes a folder with mode 0700 for the time of a launch, and removes it at the end.

    It is in the system's temporary folder and not in the run folder, which may be on a network file system.

    Raises:
        InputError: No folder can be made there.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="lit_mnist-"))
    except OSError as error:
        raise InputError(
            f"No temporary folder can be made ({error}): set TMPDIR to a folder that you can write to."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Lets Python's `tempfile` make its files in a folder: of this process, and of those forked meanwhile."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def enter_private_folder(folder: Path, temporary: str) -> None:
    """Tells this rank its launch's private folder.

    Args:
        folder: The private folder.
        temporary: The user's temporary folder, which a rank that was forked in `temporary_files_in` does not know.
    """
    os.environ[VARIABLE] = str(folder)
    tempfile.tempdir = temporary


def own_private_folder() -> Path | None:
    """Returns the private folder of the launch that this process is a rank of; None where others have started it."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else None


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
