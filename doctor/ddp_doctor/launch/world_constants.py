"""Numbers of a program that are its number of ranks: changed where the doctor runs another number of them.

Programs keep this number in arguments, options and constants, and divide by it.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
from collections.abc import MutableMapping
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


def change(values: MutableMapping[Any, Any], old: int, new: int, depth: int = 0) -> None:
    """Changes the program's number of ranks to that which is run, among named values and in settings that they hold."""
    for name, value in list(values.items()):
        if not isinstance(name, str) or name.startswith("__"):
            continue
        if type(value) is int and value == old and _NAME.search(name):
            values[name] = new
        held = value if isinstance(value, MutableMapping) else _settings(value)
        if depth < _DEEPEST and isinstance(held, MutableMapping):
            # An object of the user may permit no change.
            with suppress(Exception):
                change(held, old, new, depth + 1)


def _settings(value: Any) -> Any:
    """Returns the attributes of options and of objects of the user's classes."""
    if isinstance(value, type | ModuleType) or callable(value):
        return None
    module = sys.modules.get(type(value).__module__)
    if isinstance(value, argparse.Namespace) or is_dataclass(value) or _is_of_user(module):
        return getattr(value, "__dict__", None)
    return None


def _is_of_user(module: Any) -> bool:
    return isinstance(module, ModuleType) and is_user_file(getattr(module, "__file__", None) or "")


def change_program(old: int, new: int) -> None:
    """Changes the numbers in the frames that are running, and in the modules of the user."""
    for frame in user_frames():
        # A spawned process runs functions whose globals are a copy of those of the module.
        change(frame.f_globals, old, new)
        if frame.f_code.co_name != "<module>":
            change(frame.f_locals, old, new)
            # As Python 3.13 does by itself.
            with suppress(AttributeError):
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    for module in filter(_is_of_user, list(sys.modules.values())):
        change(vars(module), old, new)
