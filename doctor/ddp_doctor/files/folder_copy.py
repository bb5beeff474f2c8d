"""A copy of the current folder for a run, where the kernel permits no private view; it denies writes elsewhere."""

from __future__ import annotations

import os
import shutil
from collections import Counter
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
    sizes: Counter[str] = Counter()
    _copy(folder, root / folder.relative_to("/"), skipped, sizes)
    if (total := sizes.total()) > MOST_BYTES:
        name, size = sizes.most_common(1)[0]
        raise InputError(
            f"The current folder has {total / 1e6:,.0f} MB, of which {size / 1e6:,.0f} MB are in {name}. This machine "
            "permits no private view of the files, so each run needs a copy of the folder, of at most "
            f"{MOST_BYTES / 1e6:.0f} MB. Move large data to another folder, and leave a link."
        )


def _copy(source: Path, target: Path, skipped: Path, sizes: Counter[str], top: str = "") -> None:
    """Copies a folder, and adds the sizes of its entries to those of the entries of the outermost folder."""
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
                _copy(path, copy, skipped, sizes, top or entry.name)
            elif entry.is_file() and os.access(path, os.R_OK):
                sizes[top or entry.name] += entry.stat().st_size
                if sizes.total() <= MOST_BYTES:
                    shutil.copy2(path, copy)
            else:
                copy.symlink_to(path)
    shutil.copystat(source, target)


def enter(root: Path, words: Sequence[str]) -> list[str]:
    """Moves this process to the copy of its current folder, and denies it to write elsewhere.

    Args:
        root: The root, in a folder in the folder of the examination.
        words: The words of a command.

    Returns:
        The words, with the paths of the copy.
    """
    folder = str(Path.cwd())
    os.chdir(f"{root}{folder}")
    kernel.allow_writes_below([root.parents[1], Path("/dev"), Path("/proc")])
    return [*words[:1], *(word.replace(f"{folder}/", f"{root}{folder}/") for word in words[1:])]
