"""Wrappers around functions and methods of libraries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces `owner.name` by a function that calls `around(original, *args, **kwargs)`."""
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, call)


def before(owner: Any, name: str, observe: Callable[..., Any]) -> None:
    """Calls `observe` with the same arguments before each call of `owner.name`."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observe(*args, **kwargs)
        return original(*args, **kwargs)

    wrap(owner, name, around)


def wrap_everywhere(name: str, original: Any, around: Callable[..., Any]) -> None:
    """Replaces a function in all modules of torch that have it."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == "torch" and vars(module).get(name) is original:
            setattr(module, name, call)
