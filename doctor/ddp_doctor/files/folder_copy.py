"""A copy of the current folder for a run, where the kernel permits no private view; it denies writes elsewhere."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from ddp_doctor.errors import InputError
from ddp_doctor.files import kernel

MOST_BYTES = 500_000_000
# Folders that a program reads at most: a link shows the user's.
_LINKED = {".git", ".hg", ".svn", ".venv", "venv", "node_modules"}


def make(folder: Path, root: Path, skipped: Path) -> None:
    """Copies a folder to its path below another root, with links to all that is beside the folders around it.

    Args:
        folder: The folder.
        root: The root, whose parent exists.
        skipped: The folder of the examination, which is left out.

    Raises:
        InputError: The folder is too large.
    """
    for outer, inner in pairwise([*reversed(folder.parents), folder]):
        place = root / outer.relative_to("/")
        place.mkdir()
        # A relative path such as `../data` then leads to the user's. Nobody may list some folders.
        with suppress(OSError):
            for name in set(os.listdir(outer)) - {inner.name}:  # noqa: PTH208
                (place / name).symlink_to(outer / name)
    _copy(folder, root / folder.relative_to("/"), skipped, 0)


def _copy(source: Path, target: Path, skipped: Path, copied: int) -> int:
    """Copies a folder; takes the number of bytes that were copied before it, and returns that after it."""
    target.mkdir()
    for entry in os.scandir(source):
        path, copy = Path(entry.path), target / entry.name
        # Other programs may remove it meanwhile.
        with suppress(FileNotFoundError):
            if path == skipped:
                continue
            if entry.is_symlink():
                copy.symlink_to(path.readlink())
            elif entry.is_dir() and entry.name not in _LINKED and os.access(path, os.R_OK | os.X_OK):
                copied = _copy(path, copy, skipped, copied)
            elif entry.is_file() and os.access(path, os.R_OK):
                copied += entry.stat().st_size
                if copied > MOST_BYTES:
                    raise InputError(
                        f"The current folder has more than {MOST_BYTES / 1e6:.0f} MB, such as {path}. This machine "
                        "permits no private view of the files, so each run needs a copy of the folder. Move large data "
                        "to another folder, and leave a link."
                    )
                shutil.copy2(path, copy)
            else:
                copy.symlink_to(path)
    shutil.copystat(source, target)
    return copied


def enter(root: Path, words: Sequence[str]) -> list[str]:
    """Moves this process to the copy of its current folder, denies it to write elsewhere, and names it in a command."""
    folder = str(Path.cwd())
    os.chdir(f"{root}{folder}")
    kernel.allow_writes_below([root.parents[1], Path("/dev"), Path("/proc")])
    return [*words[:1], *(word.replace(f"{folder}/", f"{root}{folder}/") for word in words[1:])]
