"""Files that are whole or not there at all."""

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

# Here, since it can be asked for only by changing it, for all threads.
_UMASK = os.umask(0)
os.umask(_UMASK)
# What a file system says that does not support a call.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# File systems whose folders cannot be flushed, each of which is told of once.
_WARNED_OF: set[int] = set()


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Gives a file to write to, and puts it at `path` in one step at the end, on the disk and not only in its cache.

    The temporary file lies in the same folder, since a rename is one step within a file system only. Where the body
    raises, nothing changes.

    Raises:
        OSError: The file cannot be written; what was at `path` is still there.
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
    """Writes a whole text file in UTF-8; see `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())


def give_name(path: Path, name: Path) -> None:
    """Gives a file a second name in one step, in place of what had it; by a copy where there are no hard links.

    Raises:
        OSError: It cannot be done; what had the name still has it.
    """
    temporary = name.with_name(f".{name.name}.link.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}:
            raise
        copy_file(path, name)
        return
    os.replace(temporary, name)  # noqa: PTH105
    # A rename between two names of one file does nothing: so it is where a run was killed after it had got this far.
    temporary.unlink(missing_ok=True)
    _flush_folder(name.parent)


def copy_file(path: Path, name: Path) -> None:
    """Copies a file to another name in one step; see `whole_file`."""
    with whole_file(name) as file, path.open("rb") as source:
        shutil.copyfileobj(source, file)


def remove_temporary(folder: Path) -> None:
    """Removes what writers that were killed have left in a folder that no other process writes to."""
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
