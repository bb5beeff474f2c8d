"""The state of a module that a checkpoint of rank 0 leaves out: attributes, gradients, and the buffers of each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_mnist.plugins._private import tensor_version
from lit_mnist.plugins.generators import own_generators, restore_own_generators
from lit_mnist.plugins.plain_values import NotPlainError, as_bytes, as_tensor, pack, unpack

_DEEPEST = 3
_FOREIGN = ("torch.", "lightning.", "builtins", "numpy", "transformers.")


class ModuleState:
    """The attributes and buffers of a module that have changed since the start of the training, and its gradients.

    Attributes are those of the module, of its children (such as the states of torchmetrics objects and the `training`
    flags), and of objects of the user's own classes. Plain values, tensors, arrays, and containers of these are saved.

    Args:
        module: The module before the training.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        found = [(path, value) for path, _, _, value in _attributes(module)]
        self._initial = {path: _fingerprint(value) for path, value in found}
        # Keeps their identities from being used again.
        self._tensors = [value for _, value in found if isinstance(value, torch.Tensor)]
        self._buffers = {name: (buffer, tensor_version(buffer)) for name, buffer in module.named_buffers()}

    def save(self) -> dict[str, Any]:
        """Returns the state as nested plain values and tensors."""
        module, changed = self._module, {}
        for path, _, _, value in _attributes(module):
            fingerprint = _fingerprint(value)
            if fingerprint is not None and self._initial.get(path) != fingerprint:
                changed[path] = as_tensor(pack(value))
        grads = {}
        if not module.automatic_optimization:
            grads = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        buffers = {}
        for name, buffer in module.named_buffers():
            known, version = self._buffers.get(name, (None, 0))
            if buffer is not known or tensor_version(buffer) != version:
                buffers[name] = (buffer is known, buffer)
        return {
            "attributes": changed,
            "buffers": buffers,
            "grads": grads,
            "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
            "generators": own_generators(module, _datamodule(module)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state."""
        module, attributes = self._module, dict(state["attributes"])
        # A restored attribute may be on the way to others, and new ones may be at its end.
        for path, owner, name, _ in list(_attributes(module, missing=attributes)):
            if path in attributes:
                owner[name] = unpack(as_bytes(attributes.pop(path)), module.device)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in state["frozen"])
            if not module.automatic_optimization:
                parameter.grad = state["grads"].get(name)
        for name, (same, buffer) in state["buffers"].items():
            prefix, _, last = name.rpartition(".")
            if same:
                # DDP refers to the buffers that were there when it wrapped the module.
                module.get_buffer(name).copy_(buffer)
            else:
                setattr(module.get_submodule(prefix), last, buffer)
        restore_own_generators(state["generators"], module, _datamodule(module))


def _datamodule(module: LightningModule) -> Any:
    return getattr(module.trainer, "datamodule", None)


@cache
def _names_of_the_framework() -> frozenset[str]:
    return frozenset(vars(LightningModule())) - {"training"}


def _attributes(
    module: nn.Module, missing: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yields the path, the owner's `__dict__`, the name and the value of each attribute.

    Args:
        module: The module.
        missing: Paths, of which those whose owners do not have the attribute are yielded as well.
    """
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        stack = [(prefix, child, 0)]
        while stack:
            path, owner, depth = stack.pop()
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            known = vars(owner)
            for name in (*known, *_new_names(path, known, missing or {})):
                value = known.get(name)
                if isinstance(value, nn.Module) or (depth == 0 and name in _names_of_the_framework()):
                    continue
                yield f"{path}:{name}", known, name, value
                if depth < _DEEPEST and _is_of_the_user(value):
                    stack.append((f"{path}:{name}", value, depth + 1))


def _new_names(path: str, known: Mapping[str, Any], missing: Mapping[str, Any]) -> list[str]:
    parts = [each.rpartition(":") for each in missing]
    return [name for prefix, _, name in parts if prefix == path and name not in known]


def _is_of_the_user(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type) and not _is_foreign(value)


def _is_foreign(value: Any) -> bool:
    """Returns whether an object is a function or of a library, so that its attributes are not the user's."""
    return hasattr(value, "__code__") or f"{type(value).__module__}.".startswith(_FOREIGN)


def _fingerprint(value: Any) -> Any:
    """Returns what differs if a value has changed, or None if it is not plain."""
    if type(value) is torch.Tensor:
        # Cheaper than the content; a new tensor with the same content is saved needlessly.
        return id(value), tensor_version(value)
    try:
        return hashlib.sha256(pack(value)).digest()
    except NotPlainError:
        return None
