"""Functions that make tensors on a device, and that load them there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ddp_doctor.emulation.devices import CPU, gpus, in_memory, named, replaced
from ddp_doctor.emulation.generators import gpu_generator
from ddp_doctor.emulation.torch_internals import DeviceContext, factories, function_modes

_GENERATOR: Any = type(torch.default_generator)
_DRAWING = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like")
_OF_A_TENSOR = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided")
_DRAWS = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "bernoulli", "multinomial", "cauchy_")
_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


def install_factories() -> None:
    """Replaces the functions that make tensors."""
    for name in factories():
        replaced(torch, name, functools.partial(_factory, name in _DRAWING))
    replaced(torch, "from_numpy", _on_cpu)
    for name in _OF_A_TENSOR:
        replaced(torch.Tensor, name, _of_a_tensor)
    for owner, names in ((torch.Tensor, _DRAWS), (torch, ("bernoulli", "multinomial", "normal"))):
        for name in names:
            replaced(owner, name, _drawing)
    for name in _TYPES:
        # The old names, such as torch.cuda.FloatTensor.
        if hasattr(torch.cuda, f"{name}Tensor"):
            setattr(torch.cuda, f"{name}Tensor", functools.partial(_old_type, getattr(torch, f"{name}Tensor")))
    replaced(torch, "load", _load)
    replaced(DeviceContext, "__init__", _default)
    replaced(torch, "get_default_device", lambda original: _default_device)


def _factory(draws: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        like = args[0] if device is None and args and isinstance(args[0], torch.Tensor) else None
        target = gpus.of(like) if like is not None else named(device) or _default_device()
        if device is not None:
            kwargs["device"] = in_memory(device)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if not gpus.used and target.type != "cuda":
            return original(*args, **kwargs)
        with gpu_generator.entered(draws and target.type == "cuda"):
            result = original(*args, **kwargs)
        return gpus.place(result, target) if target.type in {"cpu", "cuda"} else result

    return make


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: gpus.place(original(*args, **kwargs), CPU)


def _of_a_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = in_memory(device)
        result = original(self, *args, **kwargs)
        target = gpus.of(self) if device is None else named(device)
        return gpus.place(result, target) if gpus.used and target is not None else result

    return make


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        known = gpus.known(first) if isinstance(first, torch.Tensor) else None
        with gpu_generator.entered(known is not None and known.type == "cuda"):
            return original(*args, **kwargs)

    return draw


def _old_type(kind: Any, *args: Any, **kwargs: Any) -> Any:
    return gpus.place(kind(*args, **kwargs), gpus.device())


def _default(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(self: Any, device: Any) -> None:
        original(self, in_memory(device))
        self.named = named(device) or CPU

    return make


def _default_device() -> torch.device:
    """Returns the device on which a tensor is made if none is named."""
    found = [vars(context)["named"] for context in function_modes() if isinstance(context, DeviceContext)]
    return found[-1] if found else CPU


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # The files of other machines may name their GPUs.
        known = named(map_location)
        place = map_location if known is not None and known.type not in {"cpu", "cuda"} else CPU
        return original(f, place, *args, **kwargs)

    return load


class _Kind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _GENERATOR)


class Generator(metaclass=_Kind):
    """Makes generators for any device, which draw on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Returns a generator of torch."""
        return _GENERATOR(in_memory(device))


def install_generator() -> None:
    """Replaces the class of the generators."""
    torch.Generator = Generator  # type: ignore[misc]
