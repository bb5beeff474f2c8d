"""Which device a tensor says it is on, although it is in the memory of the CPU: where it was made or moved to.

A transfer between two devices copies, as between real ones, so that no tensor changes through another. A GPU has a
generator of its own: what is drawn on it does not change the generator of the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_doctor.probes.wrap import wrap
from ddp_doctor.torch_internals import tree_map

CPU = torch.device("cpu")
_in_memory: Any = torch.Tensor.device.__get__
_Generator: Any = type(torch.default_generator)
# It shards parameters over a mesh of CPUs, and compares its device with theirs.
_SHARDING = "torch.distributed.fsdp."
# Equal seeds give other numbers on a GPU than on the CPU.
_MASK = 0x5DEECE66D
# What makes a tensor: in torch, beside the functions that take a default device, and as a method.
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "from_numpy")
_OF_A_TENSOR = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided")
_DRAWING = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"}
# What draws on the device of a tensor.
_DRAWS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "bernoulli", "multinomial", "cauchy_")


class Gpus:
    """The emulated GPUs of this process.

    Attributes:
        count: Their number.
        current: The index of the current one.
        used: Whether the program has put something on a GPU.
    """

    def __init__(self) -> None:
        self.count, self.current, self.used = 0, 0, False
        self._places: Any = WeakTensorKeyDictionary()

    def device(self, index: int | None = None) -> torch.device:
        """Returns the device of this index, by default the current one."""
        return torch.device("cuda", self.current if index is None else index)

    def place(self, tensor: Any, device: torch.device) -> Any:
        """Lets a tensor say that it is on a device; returns the tensor."""
        if isinstance(tensor, torch.Tensor) and device.type in {"cpu", "cuda"}:
            self.used |= device.type == "cuda"
            if self.used:
                self._places[tensor] = self.device(device.index) if device.type == "cuda" else device
        return tensor

    def known(self, tensor: Any) -> torch.device | None:
        """Returns the device on which a tensor was put; None for a result of a computation."""
        return self._places.get(tensor) if self.used and isinstance(tensor, torch.Tensor) else None

    def of(self, tensor: torch.Tensor) -> torch.device:
        """Returns the device that a tensor says it is on. A program that uses a GPU computes there."""
        real = _in_memory(tensor)
        if real.type != "cpu" or not self.used:
            return cast(torch.device, real)
        return self.known(tensor) or self.device()


class GpuGenerator:
    """The generator of the GPUs, whose state is that of torch's global one while a GPU computes."""

    def __init__(self) -> None:
        self._own = _Generator()
        self.inside = False
        self.initial_seed = 0

    @property
    def now(self) -> Any:
        """The generator of torch that has the state."""
        return torch.default_generator if self.inside else self._own

    def seed(self, seed: int) -> None:
        """Begins again with a seed."""
        self.initial_seed = int(seed)
        self.now.manual_seed((self.initial_seed ^ _MASK) & (2**63 - 1))

    @contextmanager
    def entered(self, enters: bool) -> Iterator[None]:
        """Lets everything draw from the GPU's generator, if it enters."""
        if not enters or self.inside:
            yield
            return
        cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self._own.get_state())
        self.inside = True
        try:
            yield
        finally:
            self.inside = False
            self._own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(cpu)


gpus, gpu_generator = Gpus(), GpuGenerator()


def named(device: Any) -> torch.device | None:
    """Returns the device that an argument names, which may be an index; None if it names none."""
    if isinstance(device, torch.Tensor):
        return gpus.of(device)
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cuda", device) if device >= 0 else CPU
    return torch.device(device) if isinstance(device, str | torch.device) else None


def in_memory(device: Any) -> Any:
    """Returns the device on which a tensor is really made."""
    found = named(device)
    return CPU if found is not None and found.type == "cuda" else device


def install_tensors() -> None:
    """Replaces what makes, moves and loads tensors, and what tells their device."""
    # What the workers of a loader make is on the CPU.
    os.register_at_fork(after_in_child=lambda: setattr(gpus, "used", False))
    tensor: Any = torch.Tensor
    tensor.device = property(_device_of)
    tensor.is_cuda = property(lambda self: self.device.type == "cuda")
    tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    tensor.get_device = lambda self: self.device.index if self.device.type == "cuda" else -1
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    for name, around in {"to": _to, "cuda": _cuda, "cpu": _cpu}.items():
        wrap(tensor, name, around)
    for name in ("to", "cuda", "cpu"):
        wrap(nn.Module, name, _move_module)
    wrap(nn.Module, "__call__", _call_module)
    for name in {*_LIKE, *(function.__name__ for function in _device._device_constructors())}:
        wrap(torch, name, _make)
    for name in _OF_A_TENSOR:
        wrap(tensor, name, _make)
    for name in _DRAWS:
        wrap(tensor, name, _draw)
    for name in ("bernoulli", "multinomial", "normal"):
        wrap(torch, name, _draw)
    wrap(torch, "load", _load)
    torch.Generator = Generator  # type: ignore[misc]
    wrap(_device.DeviceContext, "__torch_function__", _in_device_context)
    wrap(tensor, "_make_wrapper_subclass", _make_wrapper)
    tensor._make_wrapper_subclass = staticmethod(tensor._make_wrapper_subclass)


def _device_of(tensor: torch.Tensor) -> torch.device:
    if sys._getframe(1).f_globals.get("__name__", "").startswith(_SHARDING):
        return cast(torch.device, _in_memory(tensor))
    return gpus.of(tensor)


def _to(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    first = args[0] if args else kwargs.get("device", kwargs.get("other"))
    target = named(first)
    if target is None or target.type not in {"cpu", "cuda"}:
        result, place = original(self, *args, **kwargs), gpus.known(self)
        return result if target or place is None else gpus.place(result, place)
    if not isinstance(first, torch.Tensor):
        args, kwargs = ((CPU, *args[1:]), kwargs) if args else ((), {**kwargs, "device": CPU})
    return _moved(self, target, original(self, *args, **kwargs))


def _cuda(original: Callable[..., Any], self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _moved(self, named(device) or gpus.device(), self)


def _cpu(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return _moved(self, CPU, self)


def _moved(tensor: Any, target: torch.device, result: Any) -> Any:
    """Returns the result of a transfer, which is the same tensor only if it is known to be there."""
    if target.type == "cuda":
        target = gpus.device(target.index)
    if _in_memory(tensor).type != "cpu" or (target.type == "cpu" and not gpus.used):
        return result
    if result is tensor and gpus.known(tensor) != target:
        result = tensor.clone()
    return gpus.place(result, target)


def _move_module(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    first = args[0] if args else kwargs.get("device")
    target = CPU if original.__name__ == "cpu" else named(first)
    if original.__name__ == "cuda":
        target = target or gpus.device()
    elif target and args and not isinstance(first, torch.Tensor):
        # An index would not be accepted as a device everywhere.
        args = (target, *args[1:])
    result = original(self, *args, **kwargs)
    if target is not None:
        for tensor in (*self.parameters(), *self.buffers()):
            gpus.place(tensor, target)
    return result


def _call_module(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not gpus.used or gpu_generator.inside:
        return original(self, *args, **kwargs)
    first = next(self.parameters(), None)
    with gpu_generator.entered(first is not None and gpus.of(first).type == "cuda"):
        return original(self, *args, **kwargs)


def _make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes a tensor on the device that is named, on that of a given tensor, or on the default one."""
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    target = named(kwargs.get("device"))
    if target is not None:
        kwargs["device"] = in_memory(target)
    elif like is not None:
        target = gpus.of(like)
    else:
        modes = _get_current_function_mode_stack()
        target = next((mode.device for mode in reversed(modes) if isinstance(mode, _device.DeviceContext)), CPU)
    kwargs.pop("pin_memory", None)
    with gpu_generator.entered(target.type == "cuda" and original.__name__ in _DRAWING):
        return gpus.place(original(*args, **kwargs), target)


def _draw(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    place = gpus.known(args[0] if args else None)
    with gpu_generator.entered(place is not None and place.type == "cuda"):
        return original(*args, **kwargs)


def _in_device_context(original: Any, self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Calls a function of torch in a `with torch.device(...)`; `_make` has chosen an emulated GPU."""
    if self.device.type == "cuda":
        return function(*args, **(kwargs or {}))
    return original(self, function, types, args, kwargs)


def _make_wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes a tensor that wraps another, such as the result of an asynchronous collective."""
    return original(*args, **{**kwargs, "device": in_memory(kwargs.get("device"))})


def _load(original: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    # The files of other machines may name their GPUs.
    known = named(map_location)
    place = map_location if known is not None and known.type not in {"cpu", "cuda"} else CPU
    loaded = original(f, place, *args, **kwargs)
    return tree_map(lambda tensor: gpus.place(tensor, CPU), loaded) if known == CPU else loaded


class Generator(_Generator):  # type: ignore[misc]
    """A generator for any device, which draws on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        """Returns a generator of torch."""
        return super().__new__(cls, in_memory(device))
