"""File locks between processes, which the kernel releases when the holder exits."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import IO

_LOCKS_NEEDED = (
    "without a lock (flock) two processes could write there at once; Lustre supports it if mounted with -o flock, and "
    "NFS with a lock service"
)


def open_lock(path: Path) -> IO[str]:
    """Opens or creates a lock file for reading and writing.

    Raises:
        OSError: The file cannot be opened, or is not a regular file. Other users may have planted a symbolic link.
    """
    try:
        return open(path, "r+", opener=_open_regular)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a lock file must not be a symbolic link: remove it", str(path)) from error


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a lock file must be a regular file: remove it", path)
    return descriptor


def try_lock(file: IO[str]) -> bool:
    """Tries to lock an open file, and returns whether this process holds the lock.

    Raises:
        OSError: The file cannot be locked, for example because the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return False
        raise OSError(error.errno, f"{error.strerror}; {_LOCKS_NEEDED}", file.name) from error
    return True
