"""The temporary folder of an examination, which is removed even after the doctor was killed: at its next start."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Not that of other folders of the doctor, which nobody locks.
PREFIX = "ddp-doctor-examination-"


@contextmanager
def examination_folder() -> Iterator[Path]:
    """Yields a new temporary folder, and removes it, as well as those of doctors that were killed."""
    remove_stale()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        lock = os.open(folder, os.O_RDONLY)
        with suppress(OSError):
            # Some file systems of a network have no locks.
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            break
        # Another doctor has removed it before it was locked.
        os.close(lock)
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def remove_stale() -> None:
    """Removes the folders of this user's doctors that no longer run."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Another user of the machine may have put anything under this name.
        with suppress(OSError):
            lock = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                # A folder of this user that nobody else can read.
                if found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(folder)
            finally:
                os.close(lock)


def remove(folder: Path) -> None:
    """Removes a folder of the doctor, also what the examined program or the kernel has made unreadable."""
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        for place, folders, _files in os.walk(folder):
            for path in (Path(place, name) for name in folders):
                if not path.is_symlink():
                    with suppress(OSError):
                        path.chmod(0o700)
