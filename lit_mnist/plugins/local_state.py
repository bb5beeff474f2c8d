"""The part of a training's state that differs between ranks and that a Lightning checkpoint leaves out.

It has the generators of random numbers, the plain attributes of the module that have changed since the start (counters,
lists of outputs, `training` flags, the states of torchmetrics objects), and gradients that a module with manual
optimization carries from batch to batch. It is stored as safetensors, so that nothing is executed when it is read.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

_MOST_OBJECTS = 20_000
_LONGEST_CONTAINER = 1_000
_LEAVES = (str, bytes, int, float, complex, type, FunctionType, ModuleType, torch.Tensor, np.ndarray, torch.device)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_SEQUENCES = {"tuple": tuple, "set": set, "deque": deque}


class NotPlainError(TypeError):
    """A value is neither plain nor a tensor."""


def pack(value: Any) -> bytes:
    """Returns nested plain values and tensors as bytes in the safetensors format.

    Raises:
        NotPlainError: It has another value.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(value, tensors)).encode()
    tensors["json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return safetensors.torch.save(tensors)


def unpack(content: bytes, device: torch.device) -> Any:
    """Returns what `pack` was given; tensors that were on an accelerator come back on `device`."""
    tensors = safetensors.torch.load(content)
    return _decode(json.loads(tensors["json"].numpy().tobytes()), tensors, device)


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
        name = str(len(tensors))
        # A copy: safetensors rejects tensors that share memory.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name, "on": value.device.type}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        encoded = _encode(torch.from_numpy(value.astype(value.dtype.newbyteorder("="))), tensors)
        return {"array": encoded["tensor"]}
    if type(value) is dict:
        return {"dict": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if type(value) is list:
        return [_encode(item, tensors) for item in value]
    if type(value) in _SEQUENCES.values():
        kind = type(value).__name__
        length = value.maxlen if isinstance(value, deque) else None
        return {kind: [_encode(item, tensors) for item in value], "maxlen": length}
    raise NotPlainError(type(value).__name__)


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = tensors[value["tensor"]]
        return tensor if value["on"] == "cpu" else tensor.to(device)
    if "array" in value:
        return tensors[value["array"]].numpy()
    if "dict" in value:
        return {_decode(key, tensors, device): _decode(item, tensors, device) for key, item in value["dict"]}
    kind = next(iter(value))
    items = [_decode(item, tensors, device) for item in value[kind]]
    return deque(items, value["maxlen"]) if kind == "deque" else _SEQUENCES[kind](items)


def process_generators() -> dict[str, Any]:
    """Returns the states of the generators that every process has: Python's, NumPy's and torch's."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    state = {
        "python": random.getstate(),
        "numpy": (str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().clone()
    return state


def restore_process_generators(state: Mapping[str, Any]) -> None:
    """Restores what `process_generators` has returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())


def find_generators(*roots: Any) -> Iterator[tuple[str, Any]]:
    """Yields the generators that objects have as attributes, at any depth, with a name for each place.

    Generators that only a closure knows are not found.
    """
    stack = [(str(number), root) for number, root in enumerate(roots)]
    seen: set[int] = set()
    while stack and len(seen) < _MOST_OBJECTS:
        path, value = stack.pop()
        if id(value) in seen or value is None or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if isinstance(value, _GENERATORS):
            yield path, value
        elif isinstance(value, Mapping | list | tuple):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            if len(value) <= _LONGEST_CONTAINER:
                stack += [(f"{path}.{key}", item) for key, item in pairs]
        elif hasattr(value, "__dict__") and not _is_of_lightning(value):
            stack += [(f"{path}.{key}", item) for key, item in vars(value).items() if key != "_trainer"]


def _is_of_lightning(value: Any) -> bool:
    return type(value).__module__.startswith(("lightning.pytorch.trainer", "lightning.pytorch.strategies"))


def generator_state(generator: Any) -> Any:
    """Returns the state of a generator as a plain value."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def restore_generator(generator: Any, state: Any) -> None:
    """Restores a generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def plain_attributes(module: nn.Module) -> dict[str, bytes]:
    """Returns the plain attributes of a module and its children, packed, by their dotted names."""
    packed: dict[str, bytes] = {}
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if name.startswith("_") and name != "_update_count":  # torchmetrics counts its updates
                continue
            try:
                packed[f"{prefix}:{name}"] = pack(value)
            except NotPlainError:
                continue
    return packed


def restore_attributes(module: nn.Module, packed: Mapping[str, bytes], device: torch.device) -> None:
    """Sets attributes that `plain_attributes` has returned."""
    children = dict(module.named_modules())
    for path, content in packed.items():
        prefix, _, name = path.rpartition(":")
        vars(children[prefix])[name] = unpack(content, device)
