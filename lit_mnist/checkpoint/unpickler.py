"""A pickle interpreter for the few opcodes that a checkpoint needs, with placeholders for tensors.

Python's own unpickler exhausts the memory for a large memo index, and overflows the stack for a deeply nested key.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_mnist.checkpoint.torch_internals import ITEM_SIZES, MAKE_DICT, MAKE_TENSOR, VERSIONS

_NAMES = {*ITEM_SIZES, MAKE_TENSOR, MAKE_DICT}
_NEW: dict[str, Callable[[], Any]] = {
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False},
    **{"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple},
}
_MOST_OPCODES = 200_000
_MOST_VALUES = 1_000_000
_MOST_DIMENSIONS = 64
_DEEPEST = 50
_LONGEST_NUMBER = 128


class UnsafeError(Exception):
    """A file needs more than a checkpoint of this project; the message says what."""


@dataclass(frozen=True)
class _Name:
    """A placeholder for a class or a function."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """A placeholder for the bytes of one or more tensors."""

    bytes: int
    itemsize: int


@dataclass(frozen=True)
class _Tensor:
    """A placeholder for a tensor."""

    bytes: int


def check_values(content: bytes, sizes: dict[str, int], most_bytes: int) -> None:
    """Rejects a pickle that would call or import anything, or exhaust the memory.

    Args:
        content: The pickle.
        sizes: Bytes of the tensor records, by key.
        most_bytes: Maximum number of bytes of all tensors together.

    Raises:
        UnsafeError: The pickle is unsafe.
        Exception: The pickle is damaged.
    """
    _check_size(_build(content, sizes), most_bytes)


def _build(content: bytes, sizes: dict[str, int]) -> Any:  # noqa: PLR0912 (a case for each opcode)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        taken = stack[start:]
        del stack[start:]
        return taken

    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number > _MOST_OPCODES:
            raise UnsafeError("it has too many values")
        match opcode.name:
            case "PROTO" | "STOP":
                pass
            case name if name in _NEW:
                stack.append(_NEW[name]())
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(argument)
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND" | "APPENDS":
                items = since_mark() if opcode.name == "APPENDS" else [stack.pop()]
                _expect(stack[-1], list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = since_mark() if opcode.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                # Hashing a nested tuple may never end, or overflow the stack.
                keys = [_expect(key, str, int) for key in items[::2]]
                _expect(stack[-1], dict).update(zip(keys, items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL" if argument in _NAMES:
                stack.append(_Name(argument))
            case "BINPERSID":
                stack.append(_storage(stack.pop(), sizes))
            case "REDUCE":
                arguments, made = stack.pop(), stack.pop()
                stack.append({} if (made, arguments) == (_Name(MAKE_DICT), ()) else _tensor(made, arguments))
            case "BUILD" if isinstance(stack[-2], dict) and set(_expect(stack[-1], dict)) == {VERSIONS}:
                # The versions of the layers are not needed.
                stack.pop()
            case _:
                asked = str(argument).replace(" ", ".") if opcode.name == "GLOBAL" else opcode.name
                raise UnsafeError(f"it asks for {asked:.100}")
    (value,) = stack
    return value


def _expect(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise UnsafeError(
            f"it has a {type(value).__name__} where it needs {' or '.join(kind.__name__ for kind in kinds)}"
        )
    return value


def _storage(pid: Any, sizes: dict[str, int]) -> _Storage:
    match pid:
        case ("storage", _Name(kind), str(key), str(), int(count)) if kind in ITEM_SIZES:
            if sizes.get(key) == count * ITEM_SIZES[kind]:
                return _Storage(count * ITEM_SIZES[kind], ITEM_SIZES[kind])
    raise UnsafeError("a tensor in it does not have the bytes that it claims")


def _tensor(made: Any, arguments: Any) -> _Tensor:
    # A tensor that repeats its bytes would exhaust the memory when it is copied.
    match made, arguments:
        case _Name(name), (_Storage() as storage, int(offset), tuple(shape), tuple(strides), bool(), {**hooks}) if (
            name == MAKE_TENSOR and not hooks and len(shape) == len(strides) <= _MOST_DIMENSIONS
        ):
            numbers = [_expect(number, int) for number in (*shape, *strides)]
            needed = math.prod(shape) * storage.itemsize
            if min(offset, *numbers, 0) >= 0 and needed <= storage.bytes:
                return _Tensor(needed)
            raise UnsafeError("a tensor in it claims to be larger than it is")
    raise UnsafeError("it makes something other than a tensor")


def _check_size(value: Any, most_bytes: int) -> None:
    """Rejects values that are nested too deeply, or that are far larger than the file because they are shared."""
    left = _MOST_VALUES
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        left -= 1
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, _Tensor):
            most_bytes -= item.bytes
        elif isinstance(item, _Name | _Storage):
            raise UnsafeError("it holds something other than values and tensors")
        elif isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            waiting += [(part, depth + 1) for part in item]
        elif isinstance(item, int) and item.bit_length() > _LONGEST_NUMBER:
            raise UnsafeError("it holds a number that is too long")
        if left < 0 or most_bytes < 0 or depth > _DEEPEST:
            raise UnsafeError("its values are nested too deeply, or there are too many")
