"""The temporary folder of an examination."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def examination_folder() -> Iterator[Path]:
    """Yields a new temporary folder, and removes it."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-doctor-")).resolve()
    try:
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Removes a folder of the doctor, also what the examined program or the kernel has made unreadable."""
    # tempfile.TemporaryDirectory changes the mode of what a link leads to, before Python 3.11.8.
    for place, folders, _files in os.walk(folder):
        for path in (Path(place, name) for name in folders):
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
