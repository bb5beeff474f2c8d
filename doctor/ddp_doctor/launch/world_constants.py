"""Numbers of a program that are its number of ranks: changed where the doctor runs another number of them."""

from __future__ import annotations

import argparse
import ctypes
import inspect
import re
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any

from ddp_doctor.records.recorder import is_user_file, user_frames

# What programs call their number of ranks; `num_workers` are those of a loader.
_NAME = re.compile(
    r"world|^ws$|n_?procs?(_|$)|nproc|num_?(proc|gpu|device|rank|replica)|n_?gpus?(_|$)|n_?(ranks|devices|replicas)"
    r"|^(gpus|devices|ranks|replicas|processes|size)$",
    re.IGNORECASE,
)
_DEEPEST = 4


def changed(name: str, value: Any, old: int, new: int, depth: int = 0) -> Any:
    """Returns what a value becomes with another number of ranks. What holds values is changed itself.

    Args:
        name: What the program calls the value.
        value: The value.
        old: The program's number of ranks.
        new: The number of ranks that are run.
        depth: How many objects hold the value.
    """
    if isinstance(value, bool | str) or depth > _DEEPEST:
        return value
    if isinstance(value, int):
        return new if value == old and _NAME.search(name) else value
    with suppress(Exception):
        # An object of the user may permit no change.
        if isinstance(value, MutableMapping):
            _change_items(value, list(value.items()), value.__setitem__, old, new, depth)
        elif isinstance(value, argparse.Namespace) or is_dataclass(value) or _is_plain_object(value):
            items = list(vars(value).items())
            _change_items(value, items, lambda key, other: object.__setattr__(value, key, other), old, new, depth)
    return value


def _change_items(
    owner: Any, items: list[tuple[Any, Any]], put: Callable[[Any, Any], Any], old: int, new: int, depth: int
) -> None:
    for key, part in items:
        if isinstance(key, str) and (part is not owner or owner is None):
            other = changed(key, part, old, new, depth + 1)
            if other is not part:
                put(key, other)


def _is_plain_object(value: Any) -> bool:
    """Returns whether a value is an object of a class in the user's own files."""
    if isinstance(value, type | ModuleType) or callable(value) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    return is_user_file(getattr(module, "__file__", None) or "")


def changed_arguments(function: Any, args: tuple[Any, ...], old: int, new: int, skip: int = 1) -> tuple[Any, ...]:
    """Returns the arguments of a function that each process is started with.

    Args:
        function: The function.
        args: Its arguments after the first `skip`.
        old: The program's number of ranks.
        new: The number of ranks that are run.
        skip: How many arguments the starting function adds in front, such as the rank.
    """
    names = [""] * len(args)
    with suppress(TypeError, ValueError):
        known = list(inspect.signature(function).parameters)[skip:]
        names = [*known[: len(args)], *names[len(known) :]]
    found = tuple(changed(name, value, old, new) for name, value in zip(names, args, strict=False))
    same = [place for place, value in enumerate(args) if type(value) is int and value == old]
    if len(same) == 1 and found[same[0]] == old and not any(map(_NAME.search, names)):
        # The name says nothing, but no other argument can be it.
        found = (*found[: same[0]], new, *found[same[0] + 1 :])
    return found


def change_program(old: int, new: int) -> None:
    """Changes the numbers in the frames that are running, and in the modules of the user."""
    # A spawned process runs functions whose globals are a copy of those of the module.
    spaces = [vars(module) for module in list(sys.modules.values()) if _is_user_module(module)]
    for frame in user_frames():
        if not any(space is frame.f_globals for space in spaces):
            spaces.append(frame.f_globals)
        if frame.f_code.co_name != "<module>":
            values = frame.f_locals
            _change_items(None, list(values.items()), values.__setitem__, old, new, 0)
            write_locals(frame)
    for space in spaces:
        items = [(name, value) for name, value in space.items() if not name.startswith("__")]
        _change_items(None, items, space.__setitem__, old, new, 0)


def _is_user_module(module: Any) -> bool:
    return isinstance(module, ModuleType) and is_user_file(getattr(module, "__file__", None) or "")


def write_locals(frame: Any) -> None:
    """Makes a change of `frame.f_locals` one of the local variables, as Python 3.13 does by itself."""
    with suppress(AttributeError):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
