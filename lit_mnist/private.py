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
_VARIABLE = "LIT_MNIST_PRIVATE_FOLDER"


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
    os.environ[_VARIABLE] = str(folder)
    tempfile.tempdir = temporary
