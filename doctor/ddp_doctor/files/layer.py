"""A folder over all others, in which a process writes and removes, as a private view has it, without a kernel."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# The calls themselves: `redirect` replaces them in the module `os`.
_lstat, _stat, _readlink, _listdir, _scandir = os.lstat, os.stat, os.readlink, os.listdir, os.scandir
_mkdir, _open, _getcwd, _rename = os.mkdir, os.open, os.getcwd, os.rename
_GONE = ".ddp-doctor-gone"
# Device files, and what the kernel shows as files.
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108
_MOST_LINKS = 40


class Layer:
    """What a run has written and removed.

    Args:
        folder: Folder of the layer, in the folder of the examination, in which nothing is redirected.
    """

    def __init__(self, folder: Path) -> None:
        self._written, self._gone = f"{folder}/files", f"{folder}/gone"
        self._own = f"{folder.parent}/"
        Path(self._written).mkdir(parents=True, exist_ok=True)

    def path(self, path: object, directory: int | None = None, *, follow: bool = True) -> str | None:
        """Returns the path that the program means, without links; None if it is not redirected.

        Args:
            path: What the program gave to a call.
            directory: The open folder that the path is relative to.
            follow: Whether the last part is followed if it is a link.
        """
        if isinstance(path, int):
            if path < 0:
                return None
            name = self.meant(_readlink(f"/proc/self/fd/{path}"))
        elif isinstance(path, str | bytes | os.PathLike):
            name = os.fsdecode(path)
        else:
            return None
        if not name:
            return None
        if not name.startswith("/"):
            begin = _getcwd() if directory is None else _readlink(f"/proc/self/fd/{directory}")
            name = f"{self.meant(begin)}/{name}"
        name = self._without_links(name, follow=follow)
        free = name.startswith((self._own, *_NO_FILES)) and not name.startswith(_SHARED_MEMORY)
        return None if free else name

    def meant(self, path: str) -> str:
        """Returns the path that the program knows of a file of the layer."""
        if path == self._written or path.startswith(f"{self._written}/"):
            return path.removeprefix(self._written) or "/"
        return path

    def _without_links(self, name: str, *, follow: bool) -> str:
        parts, current, links = name.split("/"), "", 0
        while parts:
            part = parts.pop(0)
            if part in {"", "."}:
                continue
            if part == "..":
                current = current.rpartition("/")[0]
                continue
            place = self.place(f"{current}/{part}")
            last = not any(parts)
            target = ""
            if (follow or not last) and links < _MOST_LINKS:
                with suppress(OSError):
                    target = _readlink(place)
            if target:
                links += 1
                parts = target.split("/") + parts
                current = "" if target.startswith("/") else current
            else:
                current = f"{current}/{part}"
        return current or "/"

    def place(self, path: str) -> str:
        """Returns where a path is: in the layer if it was written or removed, otherwise where the user has it."""
        written = self._written + path
        return written if _exists(written) or self._is_hidden(path) else path

    def _is_hidden(self, path: str) -> bool:
        """Returns whether what the user has at a path was removed or replaced."""
        if not _exists(self._gone):
            return False
        parts = path.split("/")
        return any(_exists(f"{self._gone}{'/'.join(parts[:end])}/{_GONE}") for end in range(2, len(parts) + 1))

    def is_there(self, path: str) -> bool:
        """Returns whether a path exists."""
        return _exists(self.place(path))

    def write(self, path: str, *, content: bool = True) -> str:
        """Returns where a path is written, after a copy of what the user has there.

        Args:
            path: The path.
            content: Whether the content of a file is copied; without it, only its mode.
        """
        written, now = self._written + path, self.place(path)
        if now == written and _exists(written):
            return written
        parent = path.rpartition("/")[0]
        if parent and not self._make_folder(parent):
            return written
        if _exists(now):
            if _is_folder(now):
                self._make_folder(path)
            elif Path(now).is_symlink():
                Path(written).symlink_to(_readlink(now))
            elif content:
                shutil.copy2(now, written)
            else:
                os.close(_open(written, os.O_CREAT | os.O_WRONLY, 0o600))
                shutil.copymode(now, written)
        return written

    def write_tree(self, path: str) -> str:
        """Returns where a folder is written, after a copy of all that is in it."""
        written = self.write(path)
        if _is_folder(written):
            for name in list(self.names(path)):
                self.write_tree(f"{path}/{name}")
        return written

    def hide(self, path: str) -> None:
        """Hides what the user has at a path."""
        if _exists(path):
            marks = Path(f"{self._gone}{path}")
            marks.mkdir(parents=True, exist_ok=True)
            (marks / _GONE).touch()

    def names(self, path: str) -> dict[str, os.DirEntry[str]]:
        """Returns the entries of a folder by name."""
        found: dict[str, os.DirEntry[str]] = {}
        if not self._is_hidden(path) and _is_folder(path):
            found = {entry.name: entry for entry in _entries(path) if not self._is_hidden(f"{path}/{entry.name}")}
        if _is_folder(self._written + path):
            found |= {entry.name: entry for entry in _entries(self._written + path)}
        return found

    def is_mixed(self, path: str) -> bool:
        """Returns whether a folder is not just as the user has it."""
        return _exists(self._written + path) or _exists(self._gone + path)

    def _make_folder(self, path: str) -> bool:
        """Makes a folder of the view in the layer; returns whether there is one."""
        written, now = self._written + path, self.place(path)
        if not _is_folder(now):
            return False
        if now != written:
            self._make_folder(path.rpartition("/")[0] or "/")
            with suppress(FileExistsError):
                _mkdir(written)
                shutil.copystat(now, written)
        return True


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    with _scandir(path) as found:
        yield from found


def _exists(path: str) -> bool:
    try:
        _lstat(path)
    except OSError:
        return False
    return True


def _is_folder(path: str) -> bool:
    with suppress(OSError):
        return bool(_lstat(path).st_mode & 0o170000 == 0o040000)
    return False


_layer: Layer | None = None
_busy = threading.local()


def use(folder: Path) -> bool:
    """Takes a folder for the layer of this process; returns whether it had none."""
    global _layer  # noqa: PLW0603
    if _layer is not None:
        return False
    _layer = Layer(folder)
    return True


def meant(path: str) -> str:
    """Returns the path that the program knows of a file."""
    return _layer.meant(path) if _layer is not None else path


def written(path: Any) -> Any:
    """Returns where a library that opens files itself writes a path."""
    with calm() as layer:
        name = layer.path(path) if layer else None
        return path if layer is None or name is None else layer.write(name)


def read(path: Any) -> Any:
    """Returns where a library that opens files itself reads a path."""
    with calm() as layer:
        name = layer.path(path) if layer else None
        return path if layer is None or name is None else layer.place(name)


@contextmanager
def calm() -> Iterator[Layer | None]:
    """Yields the layer, and redirects nothing meanwhile; yields nothing where it is in use already."""
    if getattr(_busy, "on", False):
        yield None
        return
    _busy.on = True
    try:
        yield _layer
    finally:
        _busy.on = False
