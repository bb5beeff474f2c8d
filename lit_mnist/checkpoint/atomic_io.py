"""Atomic writes: at any time the file is either the old or the new one, also after a power failure."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# Read at import, since reading the umask changes it for all threads.
_UMASK = os.umask(0)
os.umask(_UMASK)
# The errors of a file system that does not support a call.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# The devices for which a warning was printed.
_WARNED_OF: set[int] = set()


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file in the same folder, flushes it to the disk at the end, and renames it to `path`.

    Raises:
        OSError: The file cannot be written; the old file remains.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_UMASK)  # noqa: PTH101
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(text.encode())


def atomic_link(path: Path, name: Path, *, flush: bool = True) -> None:
    """Replaces `name` by a hard link to `path`, or by a copy on file systems without hard links.

    Args:
        path: The file.
        name: The link.
        flush: Whether to flush the folder to the disk, which the next write into it also does.

    Raises:
        OSError: The link cannot be created; the old file remains.
    """
    temporary = name.with_name(f".{name.name}.link.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}:
            raise
        atomic_copy(path, name)
        return
    os.replace(temporary, name)  # noqa: PTH105
    # `os.replace` does nothing if both are already links to the same file.
    temporary.unlink(missing_ok=True)
    if flush:
        _flush_folder(name.parent)


def atomic_copy(path: Path, name: Path) -> None:
    """Copies a file; see `atomic_file`."""
    with atomic_file(name) as file, path.open("rb") as source:
        shutil.copyfileobj(source, file)


def remove_temporary_files(folder: Path) -> None:
    """Removes the temporary files of killed processes from a folder that no other process writes to."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _flush_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if (device := os.fstat(folder).st_dev) not in _WARNED_OF:
            _WARNED_OF.add(device)
            text = f"warning: fsync of the folder {path} is not supported ({error.strerror})"
            print(f"{text}: a power failure may undo the newest save", file=sys.stderr, flush=True)
    finally:
        os.close(folder)
