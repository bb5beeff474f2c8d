"""Wrappers around functions and methods of libraries."""

import functools
import sys
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces `owner.name`, if there is one, by a function that calls `around(original, *args, **kwargs)`."""
    if original := getattr(owner, name, None):
        setattr(owner, name, _wrapped(original, around))


def before(owner: Any, name: str, observe: Callable[..., Any]) -> None:
    """Calls `observe` with the same arguments before each call of `owner.name`."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        observe(*args, **kwargs)
        return original(*args, **kwargs)

    wrap(owner, name, around)


def _wrapped(original: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


def wrap_everywhere(name: str, original: Any, around: Callable[..., Any]) -> None:
    """Replaces a function in all modules that have it, apart from those of the doctor."""
    call = _wrapped(original, around)
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] != "ddp_doctor" and getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, call)
