"""Plain values and tensors as bytes in the safetensors format: reading them executes nothing."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch

_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}
_NAMES: dict[type, str] = {tuple: "tuple", set: "set", deque: "deque"}


class NotPlainError(TypeError):
    """A value is neither plain nor a tensor."""


def pack(value: Any) -> bytes:
    """Returns nested plain values, tensors and NumPy arrays as bytes.

    Raises:
        NotPlainError: There is another value, or a container that contains itself.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        text = json.dumps(_encode(value, tensors)).encode()
    except RecursionError:
        raise NotPlainError(type(value).__name__) from None
    tensors["json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return safetensors.torch.save(tensors)


def unpack(content: bytes, device: torch.device) -> Any:
    """Returns the value that was packed. Tensors that were on an accelerator are on `device`."""
    tensors = safetensors.torch.load(content)
    return _decode(json.loads(tensors["json"].numpy().tobytes()), tensors, device)


def as_tensor(content: bytes) -> torch.Tensor:
    """Returns bytes as a tensor, which is a value that any checkpoint may have, uint8 [len(content)]."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor made by `as_tensor`."""
    return bytes(tensor.cpu().numpy().tobytes())


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is torch.Tensor and value.layout == torch.strided:
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
    if type(value) in _NAMES:
        length = value.maxlen if isinstance(value, deque) else None
        return {_NAMES[type(value)]: [_encode(item, tensors) for item in value], "maxlen": length}
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
