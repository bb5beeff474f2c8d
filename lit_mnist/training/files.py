"""Files that are whole or not there at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # noqa: PTH101
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Writes a whole text file in UTF-8; see `whole_file`."""
    with whole_file(path) as file:
        file.write(text.encode())
