"""Redirects what Python code writes to a layer, where the machine permits no private view.

Replaced are the calls of Python that write, remove or read files by a path. What other programs and libraries in other
languages write is denied by Landlock, if the kernel has it.
"""

from __future__ import annotations

import builtins
import errno
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_mnist.doctor.files import kernel
from lit_mnist.doctor.files.layer import Layer

# The environment variable that names the layer to all processes of a run.
LAYER = "LIT_MNIST_DOCTOR_LAYER"
SITE = Path(__file__).parents[1] / "site"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READING = ("stat", "lstat", "access", "getxattr", "listxattr", "statvfs")
_CHANGING = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr")
_CREATING = ("mkdir", "mkfifo", "mknod")
_REMOVING = ("unlink", "remove", "rmdir")
_NOT_FOLLOWED = {"lstat", "lchown", *_CREATING, *_REMOVING}

_layer: Layer | None = None
_busy = threading.local()


def deny_the_rest(layer: Path) -> bool:
    """Denies this process and its children to write elsewhere than in the folder of the examination.

    Returns:
        Whether the kernel can do that.
    """
    if kernel.landlock_version() < kernel.LEAST_LANDLOCK:
        return False
    with suppress(OSError):
        kernel.allow_writes_below([layer.parent, Path("/dev"), Path("/proc")])
        return True
    return False


def start(folder: Path) -> None:
    """Redirects what this process writes from now on."""
    global _layer  # noqa: PLW0603
    if _layer is not None:
        return
    _layer = Layer(folder)
    for name in (*_READING, *_CHANGING, *_CREATING, *_REMOVING):
        _replace(os, name, functools.partial(_on_path, name))
    for name, call in (
        ("readlink", _on_readlink),
        ("open", _on_os_open),
        ("rename", _on_rename),
        ("replace", _on_rename),
        ("link", _on_link),
        ("symlink", _on_symlink),
        ("listdir", _on_listdir),
        ("scandir", _on_scandir),
        ("chdir", _on_chdir),
        ("getcwd", _on_getcwd),
    ):
        _replace(os, name, call)
    opened = functools.partial(_on_open, builtins.open)
    builtins.open = io.open = functools.wraps(builtins.open)(opened)  # type: ignore[assignment]
    sys.meta_path.insert(0, _AfterImport({"safetensors": _redirect_safetensors, "sqlite3": _redirect_sqlite}))


def written(path: Any) -> Any:
    """Returns where a library that opens files itself writes a path."""
    with _calm() as layer:
        name = layer.path(path) if layer else None
        return path if layer is None or name is None else layer.write(name)


def read(path: Any) -> Any:
    """Returns where a library that opens files itself reads a path."""
    with _calm() as layer:
        name = layer.path(path) if layer else None
        return path if layer is None or name is None else layer.place(name)


@contextmanager
def _calm() -> Iterator[Layer | None]:
    """Yields the layer, and redirects nothing meanwhile; yields nothing where it is in use already."""
    if getattr(_busy, "on", False):
        yield None
        return
    _busy.on = True
    try:
        yield _layer
    finally:
        _busy.on = False


def _replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return
    replaced = functools.wraps(original)(functools.partial(_named, call, original))
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if original in known:
            known.add(replaced)
    setattr(owner, name, replaced)


def _named(call: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls, and names the paths of the program in an error."""
    try:
        return call(original, *args, **kwargs)
    except OSError as error:
        if _layer is not None and isinstance(error.filename, str):
            error.filename = _layer.meant(error.filename)
        raise


def _on_path(kind: str, original: Callable[..., Any], path: Any = ".", *args: Any, **kwargs: Any) -> Any:
    follow = kwargs.get("follow_symlinks", True) and kind not in _NOT_FOLLOWED
    with _calm() as layer:
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
    with _calm() as layer:
        name = layer.path(path, dir_fd, follow=False) if layer else None
        place = layer.place(name) if layer and name else None
    return original(path, dir_fd=dir_fd) if place is None else original(place)


def _on_os_open(
    original: Callable[..., int], path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> int:
    with _calm() as layer:
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


def _on_open(original: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
    """Opens by the replaced os.open, so that the name of the file object is the program's."""
    if isinstance(file, int) or kwargs.get("opener") or len(args) > 6:
        return original(file, *args, **kwargs)
    return original(file, *args, **kwargs, opener=lambda path, flags: os.open(path, flags, 0o666))


def _on_rename(
    original: Callable[..., None], src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    with _calm() as layer:
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
    with _calm() as layer:
        name = layer.path(path, directory, follow=False) if layer else None
        if layer is None or name is None:
            return path
        return layer.place(name) if layer.is_there(name) else layer.write(name)


def _on_listdir(original: Callable[..., list[Any]], path: Any = ".") -> list[Any]:
    with _calm() as layer:
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
    with _calm() as layer:
        name = layer.path(path) if layer else None
        if layer is None or name is None or not layer.is_mixed(name) or not Path(layer.place(name)).is_dir():
            return original(path if layer is None or name is None else layer.place(name))
        begin = "" if isinstance(path, int) else f"{os.fsdecode(path).rstrip('/')}/"
        return _Entries([_Entry(entry, f"{begin}{entry.name}") for entry in layer.names(name).values()])


def _on_chdir(original: Callable[..., None], path: Any) -> None:
    with _calm() as layer:
        name = layer.path(path) if layer else None
        place = layer.place(name) if layer and name else path
        # What a library in another language reads by a relative path is in the user's folder.
        shown = name if name and place != name and Path(name).is_dir() else place
    original(shown)


def _on_getcwd(original: Callable[[], str]) -> str:
    return _layer.meant(original()) if _layer else original()


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes modules as soon as they are imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes
        self._loaders: dict[str, Any] = {}
        for name in [name for name in changes if name in sys.modules]:
            self._changes.pop(name)(sys.modules[name])

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Finds a module by the other finders."""
        if fullname not in self._changes or fullname in self._loaders:
            return None
        self._loaders[fullname] = None
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loaders[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """Creates the module as its own loader does."""
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Imports the module, and changes it."""
        name = module.__name__
        module.__spec__.loader = module.__loader__ = self._loaders[name]
        self._loaders[name].exec_module(module)
        self._changes[name](module)


def _redirect_safetensors(module: Any) -> None:
    save, load = module.serialize_file, module.safe_open
    module.serialize_file = lambda tensors, path, *args, **kwargs: save(tensors, written(path), *args, **kwargs)
    module.safe_open = lambda path, *args, **kwargs: load(read(path), *args, **kwargs)


def _redirect_sqlite(module: Any) -> None:
    connect = module.connect

    def redirected(database: Any, *args: Any, **kwargs: Any) -> Any:
        is_file = not kwargs.get("uri") and os.fsdecode(database) != ":memory:"
        return connect(written(database) if is_file else database, *args, **kwargs)

    module.connect = module.dbapi2.connect = redirected
