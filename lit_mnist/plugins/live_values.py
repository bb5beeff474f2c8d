"""Values of a live module: objects that a checkpoint cannot contain, but that this process has at the same place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from io import IOBase
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lit_mnist.plugins.generators import GENERATORS, kind_of, new_generator, restore_generator, state_of
from lit_mnist.plugins.lightning_internals import tensor_version
from lit_mnist.plugins.plain_classes import attributes_of, hashes_content, is_own, name_of
from lit_mnist.plugins.plain_leaves import descr_of
from lit_mnist.plugins.plain_reader import Unpacker
from lit_mnist.plugins.plain_tensors import has_plain_memory
from lit_mnist.plugins.plain_values import NotPlainError, Packer, pack

# Lightning restores their states.
_RESTORED = (Trainer, LightningDataModule, Callback, Logger, Optimizer, LightningOptimizer, LRScheduler, DataLoader)
# A tensor or an array of at least as many bytes that has not changed is not stored.
_LARGE = 1 << 20


class RestoredElsewhereError(NotPlainError):
    """A value need not be stored, since Lightning restores it."""


class LivePacker(Packer):
    """Also packs objects of the user's own classes, generators, and references to objects that are live at a place.

    Args:
        before: The live objects before the training, or None to find them.
        named: The modules, parameters and buffers, which are stored elsewhere, by their place, which begins with "=".
        packages: The packages whose classes are the user's.

    Attributes:
        live: The objects that were found, by their place.
        digests: The SHA-256 of the large ones and of hidden modules.
        versions: What tells whether a tensor, or an array of a subclass, was changed in place.
        lost: The type of each attribute of an object that cannot be stored, by its place.
    """

    def __init__(self, before: LivePacker | None, named: Mapping[str, Any], packages: frozenset[str]) -> None:
        live: dict[str, Any] = {**named, **(before.live if before else {})}
        # The first place of each.
        places = {id(each): place for place, each in reversed(live.items())}
        classes = {name_of(type(each)): type(each) for each in live.values()}
        super().__init__(places, classes, packages)
        self._before = before
        self.live: dict[str, Any] = dict(named)
        self.digests: dict[str, str] = {}
        self.versions: dict[str, Any] = {}
        self.lost: dict[str, str] = {}

    def _node(self, value: Any, place: str, number: int) -> dict[str, Any]:
        self.live[place], known = value, self.places.get(id(value), "")
        if (version := _version_of(value)) is not None:
            self.versions[place] = version
        if known.startswith("="):
            return {"kind": "live", "at": known, "class": name_of(type(value))}
        if _is_large(value) and self._is_unchanged(value, place):
            return {"kind": "same", "at": place, "class": name_of(type(value)), "digest": self.digests[place]}
        return super()._node(value, place, number)

    def _is_unchanged(self, value: Any, place: str) -> bool:
        self.digests[place] = digest(value)
        same = self._before is not None and self.places.get(id(value)) == place
        return same and self._before.digests.get(place) == self.digests[place]  # type: ignore[union-attr]

    def _is_changed(self, value: Any, known: str) -> bool:
        """Returns whether a value that cannot be stored, such as a sparse tensor, was changed in place."""
        before = self._before.versions.get(known) if self._before is not None else None
        return before is not None and _version_of(value) != before

    def other(self, value: Any, place: str, number: int) -> dict[str, Any]:
        """Returns the node of a value that is not plain."""
        kind, known = type(value), self.places.get(id(value))
        if isinstance(value, GENERATORS) and (name := kind_of(value)) is not None:
            content = self.add(state_of(value))
            return {"kind": "generator", "class": name_of(kind), "new": name, "content": content, "place": place}
        if isinstance(value, nn.Module):
            return self._hidden_module(value, known, place)
        own = is_own(kind, self.packages) and not isinstance(value, (*_RESTORED, type)) and not callable_code(value)
        if own and (known is not None or self._before is None):
            return self.object(value, place, number)
        if known is not None and not _is_used_up(value) and not self._is_changed(value, known):
            return {"kind": "live", "at": known, "class": name_of(kind)}
        if isinstance(value, _RESTORED):
            raise RestoredElsewhereError(kind.__name__)
        if self._before is None:
            return {"kind": "live", "at": place, "class": name_of(kind)}
        if not own:
            raise NotPlainError(kind.__name__)
        return super().other(value, place, number)

    def object(self, value: Any, place: str, number: int) -> dict[str, Any]:
        """Returns the node of an object of the user, without the attributes that cannot be stored."""
        items, kept = {}, []
        with self._building(number, hashes_content(type(value))):
            for name, each in attributes_of(value):
                try:
                    items[name] = self.attempt(each, f"{place}.{name}")
                except NotPlainError as error:
                    if id(value) not in self.places and self._before is not None:
                        raise
                    kept.append(name)
                    if not isinstance(error, RestoredElsewhereError):
                        self.lost[f"{place}.{name}"] = str(error)
        return {"kind": "object", "class": name_of(type(value)), "attributes": items, "kept": kept, "place": place}

    def _hidden_module(self, value: nn.Module, known: str | None, place: str) -> dict[str, Any]:
        """Returns the node of a module that the LightningModule does not have as a child, and does not save."""
        if known is None and self._before is not None:
            raise NotPlainError(type(value).__name__)
        content, known = None, known or place
        self.digests[known] = digest(dict(value.state_dict()))
        if self._before is not None and self._before.digests[known] != self.digests[known]:
            content = self.add(dict(value.state_dict()))
        return {"kind": "module", "at": known, "class": name_of(type(value)), "content": content}


class LiveUnpacker(Unpacker):
    """Reads what `LivePacker` writes; see `Unpacker`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._last: list[tuple[Mapping[str, Any], Any]] = []

    def load(self, reference: Any) -> Any:
        """Returns the value of a reference."""
        value = super().load(reference)
        last, self._last = self._last, []
        for node, each in last:
            content = super().load(node["content"])
            if isinstance(each, nn.Module):
                each.load_state_dict(content)
            else:
                restore_generator(each, content)
        return value

    def missing(self, reference: Any) -> str | None:
        """Returns the type of an object that a value needs, and that this process does not have; None without one."""
        stack, seen = [reference], set[int]()
        while stack:
            each = stack.pop()
            if isinstance(each, dict):
                stack += each.values()
            elif isinstance(each, list) and (len(each) != 1 or type(each[0]) is not int):
                stack += each
            elif isinstance(each, list) and each[0] not in seen:
                seen.add(each[0])
                node = self._nodes[each[0]]
                if self._is_missing(node):
                    return str(node["class"]).rpartition(":")[2]
                stack += [node.get(name) for name in ("content", "items", "attributes", "factory")]
        return None

    def _is_missing(self, node: Mapping[str, Any]) -> bool:
        if node["kind"] in ("live", "module", "same"):
            return self._same_kind(node, self._live, node["at"]) is None
        return node["kind"] == "object" and self._existing(node) is None and self._class(node, object) is None

    def _other(self, node: Mapping[str, Any]) -> Any:
        kind = node["kind"]
        if kind not in ("live", "module", "same", "generator"):
            return super()._other(node)
        value = self._same_kind(node, self._live, node.get("at"))
        if kind == "generator":
            value = self._same_kind(node, self._found, node["place"]) if value is None else value
            value = new_generator(node["new"]) if value is None else value
        elif kind == "same" and digest(value) != node["digest"]:
            # Only its digest was stored.
            raise ValueError(f"{node['at']} has other values than at the start of the saved training run")
        if kind == "generator" or (kind == "module" and node["content"] is not None):
            self._last.append((node, value))
        return value


def _is_large(value: Any) -> bool:
    plain = has_plain_memory(value) or (type(value) is np.ndarray and descr_of(value.dtype) is not None)
    return plain and value.nbytes >= _LARGE


def _version_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_version(value)
    # The content of a memmap is that of its file.
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray and not isinstance(value, np.memmap):
        return hashlib.sha256(value.tobytes()).hexdigest()
    return None


def digest(value: Any) -> str:
    """Returns the SHA-256 of a plain value."""
    return hashlib.sha256(pack(value)).hexdigest()


def callable_code(value: Any) -> bool:
    """Returns whether a value is a function, a method or another object whose attributes are code."""
    return hasattr(value, "__code__") or hasattr(value, "__func__")


def _is_used_up(value: Any) -> bool:
    """Returns whether a value is an iterator, whose position cannot be stored."""
    return isinstance(value, Iterator) and not isinstance(value, IOBase)
