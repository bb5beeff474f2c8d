"""Looks into a checkpoint before it is loaded: nothing that its content names is imported, called or unpacked.

torch's own `weights_only` keeps code out, but not everything that fills or oversteps memory: `bytearray(10**12)`, a
tensor of a thousand bytes that pretends to be a terabyte, and a storage that is said to be longer than its record all
pass it. What this project writes needs few opcodes, few names and no compression, so here a checkpoint's values are
built once with stand-ins for its tensors, by a reader that knows those alone: Python's own fills the memory for an
entry number that is large enough, and overflows its stack for a key that is nested deeply enough.
"""

from __future__ import annotations

import math
import os
import pickletools
import re
import struct
import zipfile
from dataclasses import dataclass
from typing import IO, Any

import torch

_STORAGES = {
    f"torch {name}Storage": getattr(torch, dtype).itemsize
    for name, dtype in (
        ("Float", "float32"),
        ("Double", "float64"),
        ("Half", "float16"),
        ("BFloat16", "bfloat16"),
        ("Long", "int64"),
        ("Int", "int32"),
        ("Short", "int16"),
        ("Char", "int8"),
        ("Byte", "uint8"),
        ("Bool", "bool"),
    )
}
_MAKE_TENSOR, _MAKE_DICT = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_NAMES = {*_STORAGES, _MAKE_TENSOR, _MAKE_DICT}
# Everything that torch.save puts into an archive; a name in capitals is another one here, but not to torch's reader.
_ENTRY = re.compile(
    r"([\w.-]+)/(?:(data\.pkl)|data/(\d{1,6})|byteorder|version|\.data/serialization_id|\.format_version|"
    r"\.storage_alignment)",
    re.ASCII,
)
_ZIP_END, _ZIP64_END = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q4sLQL")
_LARGEST_FILE = 2**32
_LARGEST_PICKLE = 2**24
_MOST_ENTRIES = 65_000
_MOST_OPCODES = 200_000
_MOST_VALUES = 1_000_000
_MOST_DIMENSIONS = 64
_DEEPEST = 50
_LONGEST_NUMBER = 128
# Of the file's size: what the tensors take together, of which some may be parts of others.
_MOST_REPEATED = 4


class UnsafeError(Exception):
    """A file asks for more than a checkpoint of this project needs; the message says what."""


@dataclass(frozen=True)
class _Name:
    """Stands for a class or function."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """Stands for the bytes of one or more tensors."""

    bytes: int
    itemsize: int


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor."""

    bytes: int


def check_archive(file: IO[bytes]) -> None:
    """Refuses a file whose content would import, call or unpack something, or take more memory than its own size.

    Raises:
        UnsafeError: It would.
        Exception: It is no archive, or a damaged one.
    """
    size = os.fstat(file.fileno()).st_size
    if size > _LARGEST_FILE:
        raise UnsafeError(f"it has {size} bytes")
    _check_end(file, size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        # torch stores without compression: what unpacks to more than the file's size was made to fill the memory.
        if unpacked > size:
            raise UnsafeError(f"it would unpack to {unpacked} bytes")
        if len({entry.filename for entry in entries}) != len(entries):
            raise UnsafeError("it has two entries of one name")
        found = {entry.filename: _ENTRY.fullmatch(entry.filename) for entry in entries}
        odd = [name for name, match in found.items() if not match]
        matches = [match for match in found.values() if match]
        pickles = [match[0] for match in matches if match[2]]
        if odd or len(pickles) != 1 or len({match[1] for match in matches}) != 1:
            raise UnsafeError(f"it holds {(odd or pickles or ['no data.pkl'])[0]!r:.100}")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UnsafeError("it is compressed")
        if archive.getinfo(pickles[0]).file_size > _LARGEST_PICKLE:
            raise UnsafeError("it holds too much beside tensors")
        content = archive.read(pickles[0])
        sizes = {match[3]: entry.file_size for entry in entries if (match := found[entry.filename]) and match[3]}
    _check_values(_build(content, sizes), _MOST_REPEATED * size)


def _check_end(file: IO[bytes], size: int) -> None:
    """Refuses an archive that two readers may find at different places, or that has a great many entries.

    torch's reader takes offsets from the beginning of the file, Python's from where the archive seems to begin.
    """
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        raise UnsafeError("it is no archive of torch.save's")
    file.seek(max(0, size - _ZIP_END.size - _ZIP64_END.size))
    tail = file.read()
    signature, *disks, here, count, length, offset, comment = _ZIP_END.unpack(tail[-_ZIP_END.size :])
    if signature != b"PK\5\6" or any(disks) or here != count or comment or count > _MOST_ENTRIES:
        raise UnsafeError("its list of entries is not at its end, or is too long")
    left = size - offset - length
    if left == len(tail):
        end64, _, _, _, _, _, *counts, length64, offset64, locator, _, place, _ = _ZIP64_END.unpack_from(tail)
        same = (end64, locator, place) == (b"PK\6\6", b"PK\6\7", offset + length)
        same = same and (*counts, length64, offset64) == (count, count, length, offset)
    else:
        same = left == _ZIP_END.size and tail[-_ZIP_END.size - 20 :][:4] != b"PK\6\7"
    if not same:
        raise UnsafeError("it holds more than one list of entries")


def _build(content: bytes, sizes: dict[str, int]) -> Any:  # noqa: PLR0912 (a case for each opcode)
    """Returns a checkpoint's values with stand-ins for its tensors.

    Args:
        content: The pickled values.
        sizes: Bytes of the tensors' records, by their keys.
    """
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
            raise UnsafeError("its values are too many")
        match opcode.name:
            case "PROTO" | "STOP":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[opcode.name]())
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
                # The hash of a tuple as a key may take for ever, or more stack than there is.
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
                stack.append({} if (made, arguments) == (_Name(_MAKE_DICT), ()) else _tensor(made, arguments))
            case "BUILD" if isinstance(stack[-2], dict) and set(_expect(stack[-1], dict)) == {"_metadata"}:
                # Versions of layers, which torch adds to a network's weights, and which nothing here reads.
                stack.pop()
            case _:
                asked = str(argument).replace(" ", ".") if opcode.name == "GLOBAL" else opcode.name
                raise UnsafeError(f"it asks for {asked:.100}")
    (value,) = stack
    return value


def _expect(value: Any, *kinds: type) -> Any:
    """Returns a value of one of the kinds, and refuses any other."""
    if type(value) not in kinds:
        raise UnsafeError(
            f"it has a {type(value).__name__} where it needs {' or '.join(kind.__name__ for kind in kinds)}"
        )
    return value


def _storage(pid: Any, sizes: dict[str, int]) -> _Storage:
    """Returns a stand-in for a tensor's bytes, which its record must hold."""
    match pid:
        case ("storage", _Name(kind), str(key), str(), int(count)) if kind in _STORAGES:
            if sizes.get(key) == count * _STORAGES[kind]:
                return _Storage(count * _STORAGES[kind], _STORAGES[kind])
    raise UnsafeError("a tensor in it has not the bytes that it pretends to have")


def _tensor(made: Any, arguments: Any) -> _Tensor:
    """Returns a stand-in for a tensor: one that repeats its bytes would fill the memory when it is copied."""
    match made, arguments:
        case _Name(name), (_Storage() as storage, int(offset), tuple(shape), tuple(strides), bool(), {**hooks}) if (
            name == _MAKE_TENSOR and not hooks and len(shape) == len(strides) <= _MOST_DIMENSIONS
        ):
            numbers = [_expect(number, int) for number in (*shape, *strides)]
            needed = math.prod(shape) * storage.itemsize
            if min(offset, *numbers, 0) >= 0 and needed <= storage.bytes:
                return _Tensor(needed)
            raise UnsafeError("a tensor in it pretends to be larger than it is")
    raise UnsafeError("it makes something else than a tensor")


def _check_values(value: Any, most_bytes: int) -> None:
    """Refuses values that would cost more to look at than they take in the file: shared many times over, or too deep.

    Raises:
        UnsafeError: They would.
    """
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
            raise UnsafeError("it holds something else than values and tensors")
        elif isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            waiting += [(part, depth + 1) for part in item]
        elif isinstance(item, int) and item.bit_length() > _LONGEST_NUMBER:
            raise UnsafeError("it holds a number that is too long")
        if left < 0 or most_bytes < 0 or depth > _DEEPEST:
            raise UnsafeError("its values are nested too deeply, or are too many")
