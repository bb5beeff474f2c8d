"""What the replaced calls do with paths, with the entries of a folder, and with the current one."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddp_doctor.files.layer import Layer, calm, meant, written

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READING = ("stat", "lstat", "access", "getxattr", "listxattr", "statvfs")
_CHANGING = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr")
_CREATING = ("mkdir", "mkfifo", "mknod")
_REMOVING = ("unlink", "remove", "rmdir")
_NOT_FOLLOWED = {"lstat", "lchown", *_CREATING, *_REMOVING}


def _on_path(kind: str, original: Callable[..., Any], path: Any = ".", *args: Any, **kwargs: Any) -> Any:
    follow = kwargs.get("follow_symlinks", True) and kind not in _NOT_FOLLOWED
    with calm() as layer:
        name = layer.path(path, kwargs.get("dir_fd"), follow=follow) if layer else None
        if layer is None or name is None or (isinstance(path, int) and kind in _READING):
            place = None
        elif kind in _REMOVING and layer.is_there(name):
            return _remove(layer, original, name, folder=kind == "rmdir")
        elif kind in (_CHANGING if layer.is_there(name) else _CREATING):
            place = layer.write(name)
        else:
            place = layer.place(name)
    if place is None:
        return original(path, *args, **kwargs)
    kwargs.pop("dir_fd", None)
    return original(place, *args, **kwargs)


def _remove(layer: Layer, original: Callable[..., Any], name: str, *, folder: bool) -> None:
    place = layer.place(name)
    is_folder = Path(place).is_dir() and not Path(place).is_symlink()
    if is_folder != folder:
        code = errno.ENOTDIR if folder else errno.EISDIR
        raise OSError(code, os.strerror(code), name)
    if folder and layer.names(name):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), name)
    layer.hide(name)
    if place != name:
        original(place)


def _on_readlink(original: Callable[..., Any], path: Any, *, dir_fd: int | None = None) -> Any:
    with calm() as layer:
        name = layer.path(path, dir_fd, follow=False) if layer else None
        place = layer.place(name) if layer and name else None
    return original(path, dir_fd=dir_fd) if place is None else original(place)


def _on_os_open(
    original: Callable[..., int], path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> int:
    with calm() as layer:
        name = layer.path(path, dir_fd, follow=not flags & os.O_NOFOLLOW) if layer else None
        if layer is None or name is None:
            place = None
        elif flags & _WRITES and not (flags & os.O_EXCL and layer.is_there(name)):
            place = layer.write(name, content=not flags & os.O_TRUNC) if _is_written(layer, name, flags) else name
        else:
            place = layer.place(name)
    return original(path, flags, mode, dir_fd=dir_fd) if place is None else original(place, flags, mode)


def _is_written(layer: Layer, name: str, flags: int) -> bool:
    """Returns whether an opened path is one that the user may write, and not a folder or a device."""
    place = layer.place(name)
    if not layer.is_there(name):
        return bool(flags & os.O_CREAT)
    return Path(place).is_dir() or (Path(place).is_file() and os.access(place, os.W_OK))


def on_open(original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
    """Opens by the replaced os.open, so that the name of the file object is the program's."""
    if isinstance(file, int) or kwargs.get("opener") or len(args) > 6:
        return original(file, *args, **kwargs)
    return original(file, *args, **kwargs, opener=lambda path, flags: os.open(path, flags, 0o666))


def _on_rename(
    original: Callable[..., None], src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    with calm() as layer:
        if layer is None:
            return original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        begin, end = layer.path(src, src_dir_fd, follow=False), layer.path(dst, dst_dir_fd, follow=False)
        source = os.fsdecode(src) if begin is None else layer.write_tree(begin)
        target = os.fsdecode(dst) if end is None else layer.write(end, content=False)
        if end is not None and Path(target).is_dir() and layer.names(end):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fsdecode(src), None, os.fsdecode(dst))
        original(source, target)
        if end is not None:
            layer.hide(end)
        if begin is not None:
            layer.hide(begin)
    return None


def _on_link(original: Callable[..., None], src: Any, dst: Any, **kwargs: Any) -> None:
    original(written(src), _new(dst, kwargs.pop("dst_dir_fd", None)), **kwargs)


def _on_symlink(original: Callable[..., None], src: Any, dst: Any, *args: Any, dir_fd: int | None = None) -> None:
    original(src, _new(dst, dir_fd), *args)


def _new(path: Any, directory: int | None) -> Any:
    """Returns where a new entry is made; what exists already stays, and lets the call fail."""
    with calm() as layer:
        name = layer.path(path, directory, follow=False) if layer else None
        if layer is None or name is None:
            return path
        return layer.place(name) if layer.is_there(name) else layer.write(name)


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
    **{name: functools.partial(_on_path, name) for name in (*_READING, *_CHANGING, *_CREATING, *_REMOVING)},
    "readlink": _on_readlink,
    "open": _on_os_open,
    "rename": _on_rename,
    "replace": _on_rename,
    "link": _on_link,
    "symlink": _on_symlink,
    "listdir": _on_listdir,
    "scandir": _on_scandir,
    "chdir": _on_chdir,
    "getcwd": _on_getcwd,
}
