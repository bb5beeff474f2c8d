"""Placeholders for what a pickle of torch.save makes: tensors, and objects that hold other values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lit_mnist.checkpoint.torch_internals import (
    DTYPES,
    ITEM_SIZES,
    MAKE_COUNTER,
    MAKE_DICT,
    MAKE_SET,
    MAKE_TENSOR,
    MAKE_TENSOR_OF_DTYPE,
    MAKE_TENSOR_OF_TYPE,
    OF_NUMBERS,
    OF_TENSORS,
    OF_TEXT,
    TENSOR_TYPES,
)

_FUNCTIONS = {MAKE_COUNTER, MAKE_DICT, MAKE_SET, MAKE_TENSOR, MAKE_TENSOR_OF_DTYPE, MAKE_TENSOR_OF_TYPE}
NAMES = {*ITEM_SIZES, *DTYPES, *TENSOR_TYPES, *OF_TENSORS, *OF_NUMBERS, *OF_TEXT, *_FUNCTIONS}
_MOST_DIMENSIONS = 64


class UnsafeError(Exception):
    """A file needs more than plain values and tensors; the message says what.

    Attributes:
        names: Whether it names classes or functions that the user may allow.
    """

    def __init__(self, message: str, *, names: bool = False) -> None:
        super().__init__(message)
        self.names = names


@dataclass(frozen=True)
class Name:
    """A placeholder for a class or a function."""

    name: str


@dataclass(frozen=True)
class Storage:
    """A placeholder for the bytes of one or more tensors."""

    bytes: int
    itemsize: int


@dataclass(frozen=True)
class Tensor:
    """A placeholder for a tensor."""

    bytes: int


@dataclass(frozen=True, eq=False)
class Object:
    """A placeholder for an object: the values that it holds, and its kind if it is a dtype or bytes."""

    parts: list[Any]
    kind: str | None = None


def expect(value: Any, *kinds: type) -> Any:
    """Returns a value that is of one of these types, and of no subclass."""
    if type(value) not in kinds:
        raise UnsafeError(
            f"it has a {type(value).__name__} where it needs {' or '.join(kind.__name__ for kind in kinds)}"
        )
    return value


def check_key(key: Any) -> None:
    """Rejects a key of a dict or a member of a set that cannot be hashed in a short time."""
    # Hashing a nested tuple may never end, or overflow the stack.
    for part in key if type(key) is tuple else (key,):
        if not isinstance(part, Object):
            expect(part, str, int, float, bool, type(None))


def storage(pid: Any, sizes: dict[str, int]) -> Storage:
    """Returns the placeholder of a storage whose record has the bytes that it claims."""
    match pid:
        case ("storage", Name(kind), str(key), str(), int(count)) if kind in ITEM_SIZES:
            if sizes.get(key) == count * ITEM_SIZES[kind]:
                return Storage(count * ITEM_SIZES[kind], ITEM_SIZES[kind])
    raise UnsafeError("a tensor in it does not have the bytes that it claims")


def call(made: Any, arguments: Any, allowed: set[str]) -> Any:
    """Returns the placeholder of what a function or a class returns."""
    match made, arguments:
        case Name(name), () if name in {MAKE_DICT, MAKE_COUNTER}:
            return {}
        case Name(name), ({**counts},) if name == MAKE_COUNTER:
            return counts
        case Name(name), (list(keys),) if name == MAKE_SET:
            for key in keys:
                check_key(key)
            return Object(keys)
        case Name(name), (str(text), str(code)) if OF_TEXT.get(name) == code:
            return Object([text], kind="bytes")
        case Name("builtins.bytearray"), () | (Object(kind="bytes"),):
            return Object(list(arguments))
        case Name(name), tuple() if name in OF_NUMBERS:
            return Object([expect(part, str, int, float) for value in arguments for part in _parts(value)])
        case Name(name), (Tensor() | Object(), *_) if name in OF_TENSORS:
            return Object(list(arguments))
        case Name(name), (function, Name(), tuple(inner), state) if name == MAKE_TENSOR_OF_TYPE:
            return Object([call(function, inner, allowed), state])
        case Name(name), tuple() if name in allowed and name not in NAMES:
            return Object([part for part in arguments if not isinstance(part, Name)])
    return _tensor(made, arguments)


def _parts(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


def _tensor(made: Any, arguments: Any) -> Tensor:
    match made, arguments:
        case Name(name), (Storage() as storage, int(offset), tuple(shape), tuple(strides), bool(), {**hooks}, *more):
            itemsize = storage.itemsize
            if name == MAKE_TENSOR_OF_DTYPE and more and isinstance(more[0], Object) and more[0].kind in DTYPES:
                itemsize = DTYPES[more.pop(0).kind].itemsize
            known = name in {MAKE_TENSOR, MAKE_TENSOR_OF_DTYPE} and all(isinstance(part, dict) for part in more)
            if known and not hooks and len(shape) == len(strides) <= _MOST_DIMENSIONS:
                numbers = [expect(number, int) for number in (*shape, *strides)]
                needed = math.prod(shape) * itemsize
                # A tensor that repeats its bytes would exhaust the memory when it is copied.
                if min(offset, *numbers, 0) >= 0 and needed <= storage.bytes:
                    return Tensor(needed)
                raise UnsafeError("a tensor in it claims to be larger than it is")
    raise UnsafeError("it makes something other than a tensor")
