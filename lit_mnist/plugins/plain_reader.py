"""Reads the graph of values that `plain_values` writes. Nothing that the file names is imported or called."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, cast

import numpy as np
import safetensors
import safetensors.torch
import torch

from lit_mnist.errors import InputError
from lit_mnist.plugins.plain_classes import (
    attributes_of,
    build,
    can_be_built,
    find_class,
    hashes_content,
    name_of,
    set_attributes,
)
from lit_mnist.plugins.plain_leaves import from_leaf, is_immediate
from lit_mnist.plugins.plain_tensors import load_tensor

# The built-in types that classes derive from; a class comes before its bases.
DICTS: tuple[type, ...] = (OrderedDict, defaultdict, Counter, dict)
MUTABLE: tuple[type, ...] = (*DICTS, list, deque, set)
BASES: dict[str, type] = {base.__name__: base for base in (*MUTABLE, tuple, frozenset, int, float, complex, str, bytes)}
_DAMAGED = (
    KeyError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    ArithmeticError,
    RuntimeError,
)
_Node = Mapping[str, Any]


class Unpacker:
    """Reads the graph of some values, whose containers are built before they are filled.

    Args:
        content: What `Packer.content` has returned.
        device: Where tensors are that were on an accelerator.
        live: Objects of this process by the place that they also had before the training run. A container, array,
            tensor or object is changed in place if it has the same class, so that other references to it remain valid.
        found: Objects of this process by their place now, for objects that are younger.
        packages: The packages whose classes are the user's.

    Raises:
        InputError: These are not the bytes of a graph.
    """

    def __init__(
        self, content: bytes, device: torch.device, live: Mapping[str, Any] | None = None,
        found: Mapping[str, Any] | None = None, packages: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._device, self._live, self._found, self._packages = device, live or {}, found or {}, packages
        self._classes = {
            name_of(type(each)): type(each) for known in (self._found, self._live) for each in known.values()
        }
        with _damage():
            self._memory = safetensors.torch.load(content)
            graph = json.loads(self._memory["json"].numpy().tobytes())
            self.root, self._nodes = graph["root"], list(graph["nodes"])
        self._built: dict[int, Any] = {}
        self._shared: dict[Any, torch.Tensor] = {}
        self._unfilled: list[tuple[_Node, Any]] = []

    def load(self, reference: Any) -> Any:
        """Returns the value of a reference.

        Raises:
            InputError: The graph is damaged, or it names a class that is not known.
        """
        with _damage():
            value = self._value(reference)
            while self._unfilled:
                self._fill(*self._unfilled.pop())
        return value

    def _value(self, reference: Any) -> Any:
        if not isinstance(reference, list):
            return reference if is_immediate(reference) else _reject()
        (number,) = reference
        if number not in self._built:
            node = self._nodes[number] if number >= 0 else _reject()
            value, unfilled = self._build(node)
            self._built[number] = value
            if unfilled:
                self._unfilled.append((node, value))
        return self._built[number]

    def _build(self, node: _Node) -> tuple[Any, bool]:
        """Returns a value, and whether it must still be filled."""
        kind = node["kind"]
        if kind in BASES:
            return self._container(node, BASES[kind])
        if kind == "object":
            return self._object(node)
        if kind in ("tensor", "array"):
            return (self._tensor(node) if kind == "tensor" else self._array(node)), False
        if kind == "enum":
            enum = self._class(node, Enum) or _reject()
            content = self._value(node["content"])
            return (enum.__members__[content] if node["named"] else enum(content)), False
        return self._other(node), False

    def _other(self, node: _Node) -> Any:
        """Returns a value of another kind, by default a leaf."""
        return from_leaf(node["kind"], self._value(node["content"]))

    def _container(self, node: _Node, base: type) -> tuple[Any, bool]:
        kind = self._class(node, base) if "class" in node else base
        if kind is None:
            _reject()
        if base not in MUTABLE:
            content = (
                self._value(node["content"]) if "content" in node else [self._value(each) for each in node["items"]]
            )
            built = base(content) if kind is base else build(kind, base, content)
            if "attributes" in node:
                set_attributes(built, {name: self._value(each) for name, each in node["attributes"].items()})
            return built, False
        length = node.get("length")
        value: Any = self._live.get(node.get("at", ""))
        if type(value) is not kind or getattr(value, "maxlen", None) != length:
            value = build(kind, base)
            if isinstance(value, deque):
                deque.__init__(value, (), length)
        return value, True

    def _object(self, node: _Node) -> tuple[Any, bool]:
        value = self._existing(node)
        if value is None:
            value = build(self._class(node, object) or _reject(), object)
        if not hashes_content(type(value)):
            return value, True
        self._fill(node, value)
        return value, False

    def _existing(self, node: _Node) -> Any:
        value = self._same_kind(node, self._live, node.get("at"))
        return self._same_kind(node, self._found, node["place"]) if value is None else value

    def _same_kind(self, node: _Node, known: Mapping[str, Any], place: str | None) -> Any:
        value = known.get(place or "")
        return value if name_of(type(value)) == node["class"] else None

    def _class(self, node: _Node, base: type) -> Any:
        kind = find_class(node["class"], self._classes)
        if kind is None or not (issubclass(kind, Enum) if base is Enum else can_be_built(kind, base, self._packages)):
            return None
        return kind

    def _fill(self, node: _Node, value: Any) -> None:
        base: Any = BASES.get(node["kind"], object)
        if "attributes" in node:
            kept = {name: each for name, each in attributes_of(value) if name in node.get("kept", ())}
            set_attributes(value, {**kept, **{name: self._value(each) for name, each in node["attributes"].items()}})
        if base is object:
            return
        items = [self._value(each) for each in node["items"]] if base not in DICTS else []
        base.clear(value)
        if base is defaultdict:
            value.default_factory = self._value(node["factory"])
        if base in DICTS:
            for key, each in node["items"]:
                base.__setitem__(value, self._value(key), self._value(each))
        elif base is set:
            set.update(value, items)
        else:
            base.extend(value, items)

    def _tensor(self, node: _Node) -> torch.Tensor:
        tensor = load_tensor(node, self._memory, self._shared, self._device)
        live: Any = self._live.get(node.get("at", ""))
        alike = type(live) is type(tensor) and live.shape == tensor.shape and live.dtype == tensor.dtype
        if not alike or live.device != tensor.device or live.is_inference():
            return tensor
        # An optimizer may refer to it.
        with torch.no_grad():
            live.copy_(tensor)
        return cast(torch.Tensor, live.requires_grad_(node["grad"]) if live.is_leaf else live)

    def _array(self, node: _Node) -> Any:
        content = load_tensor(node, self._memory, self._shared, self._device).numpy()
        dtype, shape, order = from_leaf("np.dtype", node["descr"]), tuple(node["shape"]), node["order"]
        array = np.empty(shape, dtype, order)
        if content.nbytes:
            array = np.frombuffer(bytearray(content.tobytes()), dtype).reshape(shape, order=order)
        if node["scalar"]:
            return array[()]
        live = self._live.get(node.get("at", ""))
        if type(live) is np.ndarray and live.flags.writeable and (live.shape, live.dtype) == (array.shape, array.dtype):
            live[...] = array
            array = live
        array.flags.writeable = node["write"]
        return array


def _reject() -> Any:
    raise ValueError("not plain")


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except (*_DAMAGED, safetensors.SafetensorError) as error:
        raise InputError(
            "The state of ExactCheckpoint in this checkpoint cannot be read: it is damaged, was saved by another "
            f"version, or needs a class that is not imported ({type(error).__name__}: {str(error)[:200]})."
        ) from error
