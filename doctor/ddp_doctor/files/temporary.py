"""The temporary folder of an examination, which is removed even after the doctor was killed: at its next start."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "ddp-doctor-"
_LOCK = "lock"
# A folder gets its lock as soon as it is made.
_SECONDS_WITHOUT_LOCK = 3600


@contextmanager
def examination_folder() -> Iterator[Path]:
    """Yields a new temporary folder, and removes it, as well as those of doctors that were killed."""
    remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def remove_stale() -> None:
    """Removes the folders of this user's doctors that no longer run."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Another user of the machine may have put anything under this name.
        with suppress(OSError):
            found = folder.lstat()
            # A folder of this user that nobody else can read.
            if found.st_uid == os.geteuid() and found.st_mode & 0o170077 == 0o040000 and _is_stale(folder, found):
                remove(folder)


def _is_stale(folder: Path, found: os.stat_result) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - found.st_mtime > _SECONDS_WITHOUT_LOCK
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


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
