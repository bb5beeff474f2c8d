"""The state of a module that a checkpoint of rank 0 lacks: attributes, gradients, and the buffers of each rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lit_mnist.distributed.rank import warn_once
from lit_mnist.plugins.generators import object_generators, restore_object_generators
from lit_mnist.plugins.lightning_internals import names_of_the_framework, tensor_version
from lit_mnist.plugins.live_values import LivePacker, LiveUnpacker, RestoredElsewhereError
from lit_mnist.plugins.plain_classes import package_of, packages_of
from lit_mnist.plugins.plain_leaves import is_immediate
from lit_mnist.plugins.plain_values import NotPlainError, as_bytes, as_tensor

_MOST_NAMED = 12


class ModuleState:
    """The attributes and buffers of a module on this rank, and its gradients.

    Attributes are those of the module, of its children (such as the states of torchmetrics objects and the `training`
    flags), and of objects of the user's own classes. All of them have the values of the save when it is restored: also
    those that have not changed, that were deleted, and that hooks have set again. `live_values` stores them.

    Args:
        module: The module before the training.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        children = list(module.modules())
        self._packages = packages_of(type(child) for child in children)
        self._before = LivePacker(None, _named(module), self._packages)
        self._initial: dict[str, Any] = {}
        for path, _, name, value in _attributes(module):
            with suppress(NotPlainError):
                self._before.attempt(value, f"{path}:{name}")
            self._initial.update(_immediates(f"{path}:{name}", value))
        self._buffers = {name: (buffer, tensor_version(buffer)) for name, buffer in module.named_buffers()}
        self._warned = False

    def save(self) -> dict[str, Any]:
        """Returns the state as nested plain values and tensors."""
        module = self._module
        grads = {}
        if not module.automatic_optimization:
            grads = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        buffers = {}
        for name, buffer in module.named_buffers():
            known, version = self._buffers.get(name, (None, 0))
            if buffer is not known or tensor_version(buffer) != version:
                buffers[name] = (buffer is known, buffer)
        return {
            "attributes": as_tensor(self._pack()),
            "buffers": buffers,
            "grads": grads,
            "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
            "generators": object_generators(module, _datamodule(module)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a state."""
        module = self._module
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
        self._unpack(as_bytes(state["attributes"]))
        restore_object_generators(state["generators"], module, _datamodule(module))

    def _pack(self) -> bytes:
        packer = LivePacker(self._before, _named(self._module), self._packages)
        saved: dict[str, dict[str, Any]] = {}
        lost: dict[str, str] = {}
        for path, owner, name, value in _attributes(self._module):
            try:
                reference = packer.attempt(value, f"{path}:{name}")
                saved.setdefault(path, {})[name] = {"value": reference}
            except NotPlainError as error:
                saved.setdefault(path, {})[name] = {}
                # What a library keeps for itself in its own modules is not the user's.
                private = name.startswith("_") and package_of(type(owner)) not in self._packages
                if not private and not isinstance(error, RestoredElsewhereError):
                    lost[f"{path}:{name}"] = str(error)
        lost |= packer.lost
        if lost and not self._warned:
            warn_once(
                f"ExactCheckpoint cannot store {_list(lost)}: a resumed training run continues without their values."
            )
        self._warned = True
        root = {"attributes": saved, "lost": lost, "initial": self._initial}
        return packer.content(root)

    def _unpack(self, content: bytes) -> None:
        now = LivePacker(None, _named(self._module), self._packages)
        for path, _, name, value in _attributes(self._module):
            with suppress(NotPlainError):
                now.attempt(value, f"{path}:{name}")
        live = {**self._before.live, **_named(self._module)}
        reader = LiveUnpacker(content, self._module.device, live, now.live, self._packages)
        lost, owners = dict(reader.root["lost"]), dict(self._module.named_modules())
        for path, attributes in reader.root["attributes"].items():
            for name, each in attributes.items():
                if "value" not in each:
                    continue
                if (missing := reader.missing(each["value"])) is not None or path not in owners:
                    lost[f"{path}:{name}"] = missing or "its module is missing"
                    continue
                owners[path].__dict__[name] = reader.load(each["value"])
        for path, owner, name, _ in list(_attributes(self._module)):
            library = name.startswith("_") and package_of(type(owner)) not in self._packages
            if name not in reader.root["attributes"].get(path, {}) and not library:
                del owner.__dict__[name]
        if lost:
            warn_once(f"The checkpoint does not have the values of {_list(lost)}. They have the values of a new start.")
        self._state_changes(reader.root["initial"])

    def _state_changes(self, initial: Mapping[str, Any]) -> None:
        """States which attributes the program has set to another value than at the start of the saved training."""
        own = self._initial
        changed = {
            name: f"{own[name]!r}, was {each!r}" for name, each in initial.items() if name in own and own[name] != each
        }
        if changed:
            warn_once(
                f"The program has changed since the training was saved: {_list(changed)}. The resumed training "
                "run continues with the values of the checkpoint. To train with other values, start from its weights."
            )


def _datamodule(module: LightningModule) -> Any:
    return getattr(module.trainer, "datamodule", None)


def _named(module: nn.Module) -> dict[str, Any]:
    """Returns the modules, parameters and buffers by their place."""
    named = [
        ("module", module.named_modules()),
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ]
    return {f"={kind}:{name}": each for kind, pairs in named for name, each in pairs}


def _attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yields the path of each child, the child, and the name and value of each attribute that is not Lightning's."""
    for path, child in module.named_modules():
        for name, value in list(vars(child).items()):
            skipped = isinstance(value, nn.Module) or _is_method_of(child, name, value)
            if name not in names_of_the_framework() and not skipped:
                yield path, child, name, value


def _is_method_of(child: nn.Module, name: str, value: Any) -> bool:
    """Returns whether an attribute is the method of its name, or wraps it.

    Lightning's DDP sets `forward` of a module so, and callbacks such as ExactAccumulation set `training_step`.
    """
    if isinstance(value, FunctionType):
        value = inspect.unwrap(value)
    own = getattr(value, "__self__", None) is child
    return own and getattr(value, "__func__", value) is getattr(type(child), name, None)


def _immediates(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields numbers and texts, also those in a dict such as the hyperparameters."""
    if is_immediate(value):
        yield place, value
    elif isinstance(value, dict):
        yield from (
            (f"{place}.{key}", each) for key, each in dict.items(value) if is_immediate(each) and type(key) is str
        )


def _list(found: Mapping[str, str]) -> str:
    """Returns the names of attributes as a user writes them, with a remark on each."""
    texts = []
    for place, remark in sorted(found.items()):
        path, _, name = place.partition(":")
        texts.append(f"{path + '.' if path else 'self.'}{name} ({remark})")
    rest = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
