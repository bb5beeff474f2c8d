"""Redirects what Python code writes to a layer, where the machine permits no private view.

Replaced are the calls of Python that write, remove or read files by a path. What other programs and libraries in other
languages write is denied by Landlock, if the kernel has it.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_doctor.after_import import AfterImport
from ddp_doctor.files import kernel, layer, redirected_calls
from ddp_doctor.files.layer import read, written

# The environment variable that names the layer to all processes of a run.
LAYER = "DDP_DOCTOR_LAYER"
_SITE = Path(__file__).parents[1] / "launch" / "site"


def path_with_site() -> str:
    """Returns PYTHONPATH for interpreters that redirect what they write, or install the probes, as they start."""
    return os.pathsep.join([str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])])


def deny_the_rest(folder: Path) -> bool:
    """Denies this process and its children to write elsewhere than in the folder of the examination.

    Returns:
        Whether the kernel can do that.
    """
    if kernel.landlock_version() < kernel.LEAST_LANDLOCK:
        return False
    with suppress(OSError):
        kernel.allow_writes_below([folder.parent, Path("/dev"), Path("/proc")])
        return True
    return False


def start(folder: Path) -> None:
    """Redirects what this process writes from now on."""
    if not layer.use(folder):
        return
    for name, call in redirected_calls.CALLS.items():
        _replace(os, name, call)
    opened = functools.partial(redirected_calls.on_open, builtins.open)
    builtins.open = io.open = functools.wraps(builtins.open)(opened)
    changes: dict[str, Callable[[Any], None]] = {
        "safetensors": _redirect_safetensors,
        "sqlite3": _redirect_sqlite,
        "torch": _redirect_torch,
    }
    sys.meta_path.insert(0, AfterImport(changes))


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
        if isinstance(error.filename, str):
            error.filename = layer.meant(error.filename)
        raise


def _redirect_safetensors(module: Any) -> None:
    _redirect_argument(module, "safe_open", 0, "filename", read)
    _redirect_argument(module, "serialize_file", 1, "filename", written)


def _redirect_torch(module: Any) -> None:
    _redirect_argument(module, "load", 0, "f", read)
    _redirect_argument(module, "save", 1, "f", written)


def _redirect_sqlite(module: Any) -> None:
    def place(database: Any) -> Any:
        name = os.fsdecode(database)
        return database if name == ":memory:" or name.startswith("file:") else written(database)

    _redirect_argument(module, "connect", 0, "database", place)


def _redirect_argument(module: Any, name: str, position: int, keyword: str, place: Callable[[Any], Any]) -> None:
    original = getattr(module, name)

    def redirected(*args: Any, **kwargs: Any) -> Any:
        if keyword in kwargs:
            kwargs[keyword] = place(kwargs[keyword])
        else:
            args = tuple(place(value) if number == position else value for number, value in enumerate(args))
        return original(*args, **kwargs)

    _replace_everywhere(name, original, redirected)


def _replace_everywhere(name: str, original: Any, replaced: Callable[..., Any]) -> None:
    """Replaces a function in all modules that have imported it."""
    functools.update_wrapper(replaced, original)
    for module in list(sys.modules.values()):
        if vars(module).get(name) is original:
            setattr(module, name, replaced)
