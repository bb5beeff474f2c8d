"""Tensors of one file: those that share memory share it after they are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Views of a larger memory are stored together up to this size, otherwise each alone.
_MOST_SHARED = 1 << 20
_ALIGNMENT = 16


def has_plain_memory(value: Any) -> bool:
    """Returns whether a value is a tensor whose content is its memory: neither sparse, nested, quantized nor meta."""
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_nested or value.is_quantized)
    )


def pack_tensors(tensors: Mapping[int, torch.Tensor], nodes: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns the memory of tensors as uint8 tensors by name, and completes the tensors' nodes.

    Args:
        tensors: The tensors by the number of their node.
        nodes: The nodes.
    """
    memory: dict[str, torch.Tensor] = {}
    groups: dict[Any, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, original in tensors.items():
        tensor = original.detach().resolve_conj().resolve_neg()
        nodes[number].update(
            dtype=str(tensor.dtype)[6:],
            size=list(tensor.shape),
            on=tensor.device.type,
            grad=original.requires_grad and original.is_leaf,
            parameter=isinstance(original, nn.Parameter),
        )
        key = (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.numel() else number
        groups[key].append((number, tensor))
    for group in groups.values():
        spans = [_span(tensor) for _, tensor in group]
        low, high = min(span[0] for span in spans), max(span[1] for span in spans)
        low -= low % _ALIGNMENT
        needed = sum(tensor.numel() * tensor.element_size() for _, tensor in group)
        together = high - low <= max(needed + _ALIGNMENT, _MOST_SHARED if len(group) > 1 else 0)
        for number, tensor in group:
            name, start = str(group[0][0] if together else number), tensor.storage_offset() * tensor.element_size()
            if together:
                if name not in memory:
                    memory[name] = _bytes(tensor, low, high)
                nodes[number].update(memory=name, offset=(start - low) // tensor.element_size(), stride=tensor.stride())
            else:
                alone = tensor.contiguous()
                memory[name] = _bytes(alone, *_span(alone))
                nodes[number].update(memory=name, offset=0, stride=alone.stride())
    return memory


def load_tensor(
    node: Mapping[str, Any], memory: Mapping[Any, Any], shared: dict[Any, torch.Tensor], device: Any
) -> torch.Tensor:
    """Returns the tensor of a node.

    Args:
        node: The node.
        memory: The uint8 tensors by name.
        shared: Those that are in use, on their devices.
        device: Where tensors are that were on an accelerator.

    Raises:
        ValueError: The node does not describe a tensor within its memory.
    """
    dtype = vars(torch).get(node["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{node['dtype']} is not a dtype.")
    target = torch.device("cpu") if node["on"] == "cpu" else device
    key = node["memory"], target
    if key not in shared:
        # Safetensors does not align what it reads.
        shared[key] = memory[node["memory"]].clone().to(target)
    size, stride, offset = node["size"], node["stride"], node["offset"]
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if min([*size, *stride, offset, 0]) < 0 or (0 not in size and (last + 1) * dtype.itemsize > shared[key].numel()):
        raise ValueError("A tensor exceeds its memory.")
    tensor = torch.empty(0, dtype=dtype, device=target)
    if 0 in size:
        tensor = torch.empty(size, dtype=dtype, device=target)
    else:
        tensor.set_(shared[key].untyped_storage(), offset, size, stride)
    return nn.Parameter(tensor, node["grad"]) if node["parameter"] else tensor.requires_grad_(node["grad"])


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first and last byte of a tensor in its storage."""
    if not tensor.numel():
        return 0, 0
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + int(last) + 1) * size


def _bytes(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    if low == high:
        return torch.empty(0, dtype=torch.uint8)
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    part = whole.set_(tensor.untyped_storage(), low, (high - low,), (1,))
    return part.clone() if part.device.type == "cpu" else part.cpu()
