"""What the replaced calls do with the entries of a folder, and with the current one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddp_doctor.files.active_layer import calm, meant


def _on_listdir(original: Callable[..., list[Any]], path: Any = ".") -> list[Any]:
    with calm() as layer:
        name = layer.path(path) if layer else None
        if layer is None or name is None or not layer.is_mixed(name) or not Path(layer.place(name)).is_dir():
            return original(path if layer is None or name is None else layer.place(name))
        names = list(layer.names(name))
    return [os.fsencode(entry) for entry in names] if isinstance(path, bytes) else names


class _Entry:
    """An entry of a folder with the path that the program knows."""

    def __init__(self, entry: Any, path: str) -> None:
        self._entry, self.path = entry, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> str:
        return self.path


class _Entries:
    """The entries of a folder, as os.scandir returns them."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        """Does nothing: the entries were read already."""


def _on_scandir(original: Callable[..., Any], path: Any = None) -> Any:
    path = "." if path is None else path
    with calm() as layer:
        name = layer.path(path) if layer else None
        if layer is None or name is None or not layer.is_mixed(name) or not Path(layer.place(name)).is_dir():
            return original(path if layer is None or name is None else layer.place(name))
        begin = "" if isinstance(path, int) else f"{os.fsdecode(path).rstrip('/')}/"
        return _Entries([_Entry(entry, f"{begin}{entry.name}") for entry in layer.names(name).values()])


def _on_chdir(original: Callable[..., None], path: Any) -> None:
    with calm() as layer:
        name = layer.path(path) if layer else None
        place = layer.place(name) if layer and name else path
        # What a library in another language reads by a relative path is in the user's folder.
        shown = name if name and place != name and Path(name).is_dir() else place
    original(shown)


def _on_getcwd(original: Callable[[], str]) -> str:
    return meant(original())


CALLS: dict[str, Callable[..., Any]] = {
    "listdir": _on_listdir,
    "scandir": _on_scandir,
    "chdir": _on_chdir,
    "getcwd": _on_getcwd,
}
