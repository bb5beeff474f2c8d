"""The layer of this process, in which the replaced calls write and read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_doctor.files.layer import Layer

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
