"""Plain values, containers, tensors and objects as bytes in the safetensors format: reading them executes nothing.

The values are nodes of a graph, so that two references to one list are still two references to one list. Tensors that
share memory still share it.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import safetensors.torch
import torch

from lit_mnist.plugins.plain_classes import attributes_of, can_be_built, find_class, hashes_content, name_of
from lit_mnist.plugins.plain_leaves import are_immediate, descr_of, is_immediate, leaf
from lit_mnist.plugins.plain_reader import BASES, DICTS, MUTABLE, Unpacker
from lit_mnist.plugins.plain_tensors import has_plain_memory, pack_tensors

# The content of an instance of a subclass, whatever that overrides.
_CONTENT: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}
_Node = dict[str, Any]


class NotPlainError(TypeError):
    """A value cannot be stored; the message is its type."""


def pack(value: Any) -> bytes:
    """Returns plain values, containers, tensors, arrays, and objects of importable classes as bytes.

    Raises:
        NotPlainError: There is another value.
    """
    packer = Packer()
    return packer.content(packer.attempt(value, ""))


def unpack(content: bytes, device: torch.device) -> Any:
    """Returns the value that was packed. Tensors that were on an accelerator are on `device`.

    Raises:
        InputError: The content is not that of `pack`, or names a class that is not imported.
    """
    reader = Unpacker(content, device)
    return reader.load(reader.root)


def as_tensor(content: bytes) -> torch.Tensor:
    """Returns bytes as a tensor, which is a value that any checkpoint may have, uint8 [len(content)]."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor made by `as_tensor`."""
    return bytes(tensor.cpu().numpy().tobytes())


def _file_of(text: bytes) -> bytes:
    """Returns what `safetensors.torch.save` returns for a text alone, in a quarter of the time.

    ExactCheckpoint hashes the indices of each batch in this form.
    """
    entry = {"dtype": "U8", "shape": [len(text)], "data_offsets": [0, len(text)]}
    header = json.dumps({"json": entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + text


class Packer:
    """Builds the graph of some values.

    Attributes:
        places: The place of each object that the reader also has, by its identity; see `Unpacker`.
        classes: The classes that the reader knows by name.
        packages: The packages whose classes are the user's.
    """

    def __init__(
        self,
        places: Mapping[int, str] | None = None,
        classes: Mapping[str, type] | None = None,
        packages: frozenset[str] = frozenset(),
    ) -> None:
        self.places, self.classes, self.packages = places or {}, classes or {}, packages
        self._nodes: list[_Node] = []
        self._index: dict[int, int] = {}
        # The values themselves, since the identity of a deleted one may be used again.
        self._values: list[Any] = []
        self._tensors: dict[int, torch.Tensor] = {}
        # Nodes whose content must be known before they can be built: no cycle may consist of these alone.
        self._unbuilt: set[int] = set()

    def add(self, value: Any, place: str = "") -> Any:
        """Adds a value, and returns its reference.

        Raises:
            NotPlainError: The value, or one in it, cannot be stored.
        """
        if is_immediate(value):
            return value
        if (number := self._index.get(id(value))) is not None:
            if number in self._unbuilt:
                raise NotPlainError(type(value).__name__)
            return [number]
        number = len(self._nodes)
        self._nodes.append({})
        self._values.append(value)
        self._index[id(value)] = number
        self._nodes[number] = self._node(value, place, number)
        return [number]

    def attempt(self, value: Any, place: str) -> Any:
        """Adds a value as `add` does, or leaves the graph as it is and raises NotPlainError."""
        count, unbuilt = len(self._nodes), self._unbuilt
        try:
            return self.add(value, place)
        except (NotPlainError, RecursionError) as error:
            for each in self._values[count:]:
                del self._index[id(each)]
            del self._nodes[count:], self._values[count:]
            self._tensors = {number: each for number, each in self._tensors.items() if number < count}
            self._unbuilt = unbuilt
            raise NotPlainError(type(value).__name__ if isinstance(error, RecursionError) else str(error)) from None

    def content(self, root: Any) -> bytes:
        """Returns the graph as bytes.

        Args:
            root: The reference of its first value.
        """
        arrays = pack_tensors(self._tensors, self._nodes)
        text = json.dumps({"root": root, "nodes": self._nodes}).encode()
        if not arrays:
            return _file_of(text)
        return safetensors.torch.save({**arrays, "json": torch.frombuffer(bytearray(text), dtype=torch.uint8)})

    def _node(self, value: Any, place: str, number: int) -> _Node:
        known = {"at": self.places[id(value)]} if id(value) in self.places else {}
        return {**known, **(self._plain(value, place, number) or self.other(value, place, number))}

    def other(self, value: Any, place: str, number: int) -> _Node:
        """Returns the node of a value that is not plain."""
        self._require_class(value, object)
        return self.object(value, place, number)

    def object(self, value: Any, place: str, number: int) -> _Node:
        """Returns the node of an object, with its attributes."""
        with self._building(number, hashes_content(type(value))):
            items = {name: self.add(each, f"{place}.{name}") for name, each in attributes_of(value)}
        return {"kind": "object", "class": name_of(type(value)), "attributes": items, "place": place}

    def _plain(self, value: Any, place: str, number: int) -> _Node | None:
        if (found := leaf(value)) is not None:
            return {"kind": found[0], "content": self.add(found[1])}
        if has_plain_memory(value):
            self._tensors[number] = value
            return {"kind": "tensor"}
        if type(value) is np.ndarray or isinstance(value, np.generic):
            return self._array(value, number)
        if isinstance(value, Enum):
            self._require_class(value, Enum)
            by_name = value.name in type(value).__members__
            content = self.add(value.name if by_name else value.value)
            return {"kind": "enum", "class": name_of(type(value)), "named": by_name, "content": content}
        base = next((each for each in BASES.values() if isinstance(value, each)), None)
        return None if base is None else self._container(value, base, place, number)

    def _array(self, value: Any, number: int) -> _Node:
        array = np.asarray(value)
        # An empty text has no bytes, but NumPy gives its array one character.
        descr = descr_of(array.dtype)
        scalar = array is not value
        if descr is None or (scalar and type(array[()]) is not type(value)):
            raise NotPlainError(type(value).__name__)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        content = bytearray(array.tobytes(order))  # type: ignore[arg-type]
        self._tensors[number] = (
            torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        )
        shape, writeable = list(array.shape), array.flags.writeable
        return {"kind": "array", "descr": descr, "shape": shape, "order": order, "write": writeable, "scalar": scalar}

    def _container(self, value: Any, base: type, place: str, number: int) -> _Node:
        kind = type(value)
        node: _Node = {"kind": base.__name__}
        if kind is not base:
            self._require_class(value, base)
            node["class"] = name_of(kind)
        with self._building(number, base not in MUTABLE):
            if kind is not base:
                node["attributes"] = {name: self.add(each, f"{place}.{name}") for name, each in attributes_of(value)}
            if base in DICTS:
                pairs = list(base.items(value))  # type: ignore[attr-defined]
                node["items"] = [[self.add(key), self.add(each, f"{place}[{key!r}]")] for key, each in pairs]
            elif base in _CONTENT:
                node["content"] = self.add(_CONTENT[base](value))
            else:
                items = list(base.__iter__(value))  # type: ignore[attr-defined]
                if not are_immediate(items):
                    items = [self.add(each, f"{place}[{index}]") for index, each in enumerate(items)]
                node["items"] = items
            if isinstance(value, defaultdict):
                node["factory"] = self.add(value.default_factory, f"{place}.default_factory")
        return {**node, "length": value.maxlen} if isinstance(value, deque) else node

    def _require_class(self, value: Any, base: type) -> None:
        """Raises NotPlainError if the reader could not find the class."""
        kind = type(value)
        found = find_class(name_of(kind), self.classes)
        if found is not kind or not (base is Enum or can_be_built(kind, base, self.packages)):
            raise NotPlainError(kind.__name__)

    @contextmanager
    def _building(self, number: int, unbuilt: bool) -> Iterator[None]:
        before = self._unbuilt
        self._unbuilt = before | {number} if unbuilt else set()
        yield
        self._unbuilt = before
