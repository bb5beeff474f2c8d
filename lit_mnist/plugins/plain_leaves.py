"""Immutable values of the standard library, torch and NumPy: how each is written with simpler values."""

from __future__ import annotations

import ast
import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch

# The only classes that are values themselves, such as the factory of a defaultdict.
_TYPES = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object),
        *(Counter, OrderedDict, defaultdict, deque, torch.Tensor),
    )
}
_ZONES = (type(None), timezone, ZoneInfo)


def is_immediate(value: Any) -> bool:
    """Returns whether JSON has a value exactly."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is int:
        return -(1 << 63) <= value < 1 << 63
    if kind is str:
        return value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)
    return value is None or kind is bool


def are_immediate(values: list[Any]) -> bool:
    """Returns whether JSON has all of some values exactly."""
    if set(map(type, values)) == {int}:
        # The state of a generator has hundreds of numbers.
        return is_immediate(min(values)) and is_immediate(max(values))
    return all(map(is_immediate, values))


def _torch_constant(name: str, kind: type) -> Any:
    found = vars(torch).get(name)
    if type(found) is not kind:
        raise ValueError(name)
    return found


def _float(content: bytes) -> float:
    (value,) = struct.unpack("<d", content)
    return float(value)


def _moment(value: datetime | time) -> tuple[Any, ...]:
    names = ("year", "month", "day") if isinstance(value, datetime) else ()
    parts = [getattr(value, name) for name in (*names, "hour", "minute", "second", "microsecond")]
    return (*parts, value.tzinfo, value.fold)


def _constant(kind: type) -> tuple[str, Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns how a constant of torch is written: its name without the module."""
    return kind.__name__, lambda value: str(value).removeprefix("torch."), partial(_torch_constant, kind=kind)


def _text_of(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def _parts(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(getattr(value, name) for name in names)


_CODE = "utf-32-le", "surrogatepass"
# The kind, what a value is written with, and the way back.
LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("exact int", hex, lambda text: int(text, 16)),
    float: ("exact float", lambda value: struct.pack("<d", value).hex(), lambda text: _float(bytes.fromhex(text))),
    str: ("exact str", lambda value: value.encode(*_CODE).hex(), lambda text: bytes.fromhex(text).decode(*_CODE)),
    complex: ("exact complex", _parts("real", "imag"), lambda parts: complex(*parts)),
    bytes: ("exact bytes", _text_of, base64.b64decode),
    bytearray: ("bytearray", _text_of, lambda text: bytearray(base64.b64decode(text))),
    slice: ("slice", _parts("start", "stop", "step"), lambda parts: slice(*parts)),
    range: ("range", _parts("start", "stop", "step"), lambda parts: range(*parts)),
    type(...): ("ellipsis", lambda _: None, lambda _: ...),
    type(NotImplemented): ("not implemented", lambda _: None, lambda _: NotImplemented),
    Decimal: ("Decimal", str, Decimal),
    Fraction: ("Fraction", _parts("numerator", "denominator"), lambda parts: Fraction(*parts)),
    date: ("date", _parts("year", "month", "day"), lambda parts: date(*parts)),
    datetime: ("datetime", _moment, lambda parts: datetime(*parts[:-1], fold=parts[-1])),
    time: ("time", _moment, lambda parts: time(*parts[:-1], fold=parts[-1])),
    timedelta: ("timedelta", _parts("days", "seconds", "microseconds"), lambda parts: timedelta(*parts)),
    timezone: ("timezone", lambda value: value.__getinitargs__(), lambda parts: timezone(*parts)),
    PosixPath: ("PosixPath", str, PosixPath),
    PurePosixPath: ("PurePosixPath", str, PurePosixPath),
    PureWindowsPath: ("PureWindowsPath", str, PureWindowsPath),
    UUID: ("UUID", lambda value: value.hex, UUID),
    torch.Size: ("Size", tuple, torch.Size),
    torch.device: ("device", str, torch.device),
    **{kind: _constant(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
}
_BACK = {name: back for name, _, back in LEAVES.values()}


def leaf(value: Any) -> tuple[str, Any] | None:
    """Returns the kind of a value, and what it is written with; None for another value."""
    if isinstance(value, type):
        name = str(value.__name__)
        return ("type", name) if _TYPES.get(name) is value else None
    if isinstance(value, np.dtype):
        return None if descr_of(value) is None else ("np.dtype", descr_of(value))
    if type(value) is ZoneInfo:
        return ("ZoneInfo", value.key) if value.key else None
    if type(value) in (datetime, time) and type(value.tzinfo) not in _ZONES:
        return None
    if (found := LEAVES.get(type(value))) is None:
        return None
    return found[0], found[1](value)


def from_leaf(kind: str, content: Any) -> Any:
    """Returns the value that `leaf` has written.

    Raises:
        KeyError: The kind is unknown.
    """
    if kind == "type":
        return _TYPES[content]
    if kind == "np.dtype":
        return np.lib.format.descr_to_dtype(ast.literal_eval(content))
    return ZoneInfo(content) if kind == "ZoneInfo" else _BACK[kind](content)


def descr_of(dtype: np.dtype[Any]) -> str | None:
    """Returns the text that NumPy's file format has for a dtype; None if that is not the whole dtype."""
    if dtype.hasobject or dtype.metadata is not None:
        return None
    descr = np.lib.format.dtype_to_descr(dtype)
    back = np.lib.format.descr_to_dtype(descr)
    return repr(descr) if back == dtype and back.isalignedstruct == dtype.isalignedstruct else None
