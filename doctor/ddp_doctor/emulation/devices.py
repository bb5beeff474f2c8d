"""Which device a tensor says it is on, and how tensors and modules are moved.

A transfer between two devices copies, as between real ones, so that no tensor changes through another.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from ddp_doctor.emulation.torch_internals import TensorDictionary, make_wrappers_in_memory

CPU = torch.device("cpu")
_in_memory: Any = torch.Tensor.device.__get__


class Gpus:
    """The emulated GPUs of this process.

    Attributes:
        count: Their number.
        current: The index of the current one.
        used: Whether the program has put something on a GPU.
    """

    def __init__(self) -> None:
        self.count, self.current, self.used = 0, 0, False
        self._places: Any = TensorDictionary()

    def device(self, index: int | None = None) -> torch.device:
        """Returns the device of this index, by default the current one."""
        return torch.device("cuda", self.current if index is None else index)

    def place(self, tensor: Any, device: torch.device) -> Any:
        """Lets a tensor say that it is on a device; returns the tensor."""
        if isinstance(tensor, torch.Tensor):
            self.used |= device.type == "cuda"
            if self.used:
                self._places[tensor] = self.device(device.index) if device.type == "cuda" else device
        return tensor

    def known(self, tensor: torch.Tensor) -> torch.device | None:
        """Returns the device on which a tensor was put; None for a result of a computation."""
        return self._places.get(tensor) if self.used else None

    def of(self, tensor: torch.Tensor) -> torch.device:
        """Returns the device that a tensor says it is on. A program that uses a GPU computes there."""
        real = _in_memory(tensor)
        if real.type != "cpu" or not self.used:
            return cast(torch.device, real)
        return cast(torch.device, self._places.get(tensor) or self.device())


gpus = Gpus()
# It shards parameters over a mesh of CPUs, and compares its device with theirs.
_SHARDING = "torch.distributed.fsdp."


def _device(tensor: torch.Tensor) -> torch.device:
    if sys._getframe(1).f_globals.get("__name__", "").startswith(_SHARDING):
        return cast(torch.device, _in_memory(tensor))
    return gpus.of(tensor)


def named(device: Any) -> torch.device | None:
    """Returns the device that an argument names, which may be an index; None if it names none."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cuda", device) if device >= 0 else CPU
    if isinstance(device, str):
        return torch.device(device)
    return None


def in_memory(device: Any) -> Any:
    """Returns the device on which a tensor is really made."""
    found = named(device)
    return CPU if found is not None and found.type == "cuda" else device


def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces `owner.name` by what `make` returns for it."""
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, functools.wraps(original)(make(original)))


def install_devices() -> None:
    """Replaces the methods of tensors and modules that depend on a device."""
    # What the workers of a loader make is on the CPU.
    os.register_at_fork(after_in_child=lambda: setattr(gpus, "used", False))
    tensor: Any = torch.Tensor
    make_wrappers_in_memory(in_memory)
    tensor.device = property(_device)
    tensor.is_cuda = property(lambda self: self.device.type == "cuda")
    tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    tensor.get_device = lambda self: self.device.index if self.device.type == "cuda" else -1
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    replaced(tensor, "to", _to)
    tensor.cuda = functools.wraps(tensor.cuda)(_cuda)
    tensor.cpu = functools.wraps(tensor.cpu)(lambda self, *args, **kwargs: _moved(self, CPU, self))
    replaced(tensor, "type", _type)
    for name in ("to", "cuda", "cpu"):
        replaced(nn.Module, name, functools.partial(_module, name))


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device", kwargs.get("other"))
        target = first.device if isinstance(first, torch.Tensor) else named(first)
        if target is None or target.type not in {"cpu", "cuda"}:
            result = original(self, *args, **kwargs)
            place = gpus.known(self)
            return result if target or place is None else gpus.place(result, place)
        if not isinstance(first, torch.Tensor):
            args = (CPU, *args[1:]) if args else ()
            kwargs = kwargs if args else {**kwargs, "device": CPU}
        return _moved(self, target, original(self, *args, **kwargs))

    return to


def _cuda(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    target = named(device)
    return _moved(self, gpus.device() if target is None else target, self)


def _moved(tensor: Any, target: torch.device, result: Any) -> Any:
    """Returns the result of a transfer, which is the same tensor only if it is known to be there."""
    if target.type == "cuda":
        target = gpus.device(target.index)
    if _in_memory(tensor).type != "cpu" or (target.type == "cpu" and not gpus.used):
        return result
    known = gpus.known(tensor)
    if result is tensor and known != target:
        result = tensor.clone()
    return gpus.place(result, target)


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            return name.replace("torch.", "torch.cuda.", 1) if self.is_cuda else name
        moves = isinstance(dtype, str) and dtype.startswith("torch.cuda.")
        result = original(self, dtype.replace(".cuda", "", 1) if moves else dtype, *args, **kwargs)
        return _moved(self, gpus.device(), result) if moves else result

    return convert


def _module(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def move(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device")
        target = first.device if isinstance(first, torch.Tensor) else named(first)
        if name != "to":
            target = CPU if name == "cpu" else target or gpus.device()
        if name == "to" and target is not None and args and not isinstance(first, torch.Tensor):
            # An index would not be accepted as a device everywhere.
            args = (target, *args[1:])
        result = original(self, *args, **kwargs)
        if target is not None and target.type in {"cpu", "cuda"}:
            for tensor in (*self.parameters(), *self.buffers()):
                gpus.place(tensor, target)
        return result

    return move
