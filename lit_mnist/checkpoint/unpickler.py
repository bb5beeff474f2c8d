"""A pickle interpreter for the few opcodes that a checkpoint needs, with placeholders for tensors and objects.

Python's own unpickler exhausts the memory for a large memo index, and overflows the stack for a deeply nested key.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from itertools import islice
from typing import Any

from lit_mnist.checkpoint.placeholders import (
    NAMES,
    Name,
    Object,
    Storage,
    Tensor,
    UnsafeError,
    call,
    check_key,
    expect,
    storage,
)
from lit_mnist.checkpoint.torch_internals import DTYPES, VERSIONS, allowed_globals

_NEW: dict[str, Callable[[], Any]] = {
    **{"NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False},
    **{"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple},
}
# Limits without tensors, and for each tensor.
_MOST_OPCODES, _OPCODES_OF_TENSOR = 300_000, 40
_MOST_VALUES, _VALUES_OF_TENSOR = 1_000_000, 100
_DEEPEST = 50
_LONGEST_NUMBER = 128


def check_values(content: bytes, sizes: dict[str, int], most_bytes: int) -> None:
    """Rejects a pickle that would call or import anything, or exhaust the memory.

    What the user has allowed with `torch.serialization.add_safe_globals` is accepted.

    Args:
        content: The pickle.
        sizes: Bytes of the tensor records, by key.
        most_bytes: Maximum number of bytes of all tensors together.

    Raises:
        UnsafeError: The pickle is unsafe.
        Exception: The pickle is damaged.
    """
    value = _build(content, sizes, allowed_globals())
    _check_size(value, most_bytes, _MOST_VALUES + _VALUES_OF_TENSOR * len(sizes))


def _build(content: bytes, sizes: dict[str, int], allowed: set[str]) -> Any:  # noqa: PLR0912 (a case for each opcode)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        taken = stack[start:]
        del stack[start:]
        return taken

    most = _MOST_OPCODES + _OPCODES_OF_TENSOR * len(sizes)
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number > most:
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
                expect(stack[-1], list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = since_mark() if opcode.name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                _set_items(stack[-1], items)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL" if (name := _full_name(argument)) in DTYPES:
                stack.append(Object([], kind=name))
            case "GLOBAL" if (name := _full_name(argument)) in NAMES or name in allowed:
                stack.append(Name(name))
            case "BINPERSID":
                stack.append(storage(stack.pop(), sizes))
            case "REDUCE" | "NEWOBJ":
                arguments, made = stack.pop(), stack.pop()
                stack.append(call(made, arguments, allowed))
            case "BUILD":
                _set_state(stack[-2], stack.pop())
            case "GLOBAL":
                raise UnsafeError(_explain_globals(content, allowed), names=True)
            case _:
                raise UnsafeError(f"it asks for {opcode.name}")
    (value,) = stack
    return value


def _full_name(argument: Any) -> str:
    """Returns the name of a GLOBAL, of which the second protocol writes the modules of Python 2."""
    module, _, name = argument.partition(" ")
    return f"{'builtins' if module == '__builtin__' else module}.{name}"


def _explain_globals(content: bytes, allowed: set[str]) -> str:
    opcodes = islice(pickletools.genops(content), _MOST_OPCODES)
    names = {_full_name(argument) for opcode, argument, _ in opcodes if opcode.name == "GLOBAL"}
    needed = ", ".join(f"{name:.100}" for name in sorted(names - NAMES - allowed)[:5])
    return f"it needs {needed}, which weights_only=True does not load"


def _set_items(target: Any, items: list[Any]) -> None:
    if isinstance(target, Object):
        target.parts.extend(items)
        return
    for key in items[::2]:
        check_key(key)
    expect(target, dict).update(zip(items[::2], items[1::2], strict=True))


def _set_state(target: Any, state: Any) -> None:
    if isinstance(target, Object):
        target.parts.append(state)
    elif type(target) is not dict or set(expect(state, dict)) != {VERSIONS}:
        # The versions of the layers are not needed.
        raise UnsafeError("it changes something other than an object")


def _check_size(value: Any, most_bytes: int, most_values: int) -> None:
    """Rejects values that are nested too deeply, or that are far larger than the file because they are shared."""
    left = most_values
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        left -= 1
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, Tensor):
            most_bytes -= item.bytes
        elif isinstance(item, Name | Storage):
            raise UnsafeError("it holds something other than values and tensors")
        elif isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple | Object):
            waiting += [(part, depth + 1) for part in (item.parts if isinstance(item, Object) else item)]
        elif isinstance(item, int) and item.bit_length() > _LONGEST_NUMBER:
            raise UnsafeError("it holds a number that is too long")
        if left < 0 or most_bytes < 0 or depth > _DEEPEST:
            raise UnsafeError("its values are nested too deeply, or there are too many")
