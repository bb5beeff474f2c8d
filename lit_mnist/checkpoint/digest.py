"""SHA-256 digests of weights and of nested values, equal on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

_Hash = Any


def weights_sha256(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Returns the SHA-256 of a network's weights.

    For each key in sorted order: the UTF-8 text `name|dtype|shape`, then the contiguous little-endian bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        _add_tensor(digest, name, state_dict[name])
    return digest.hexdigest()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Returns the SHA-256 of a tensor's dtype, shape and contiguous little-endian bytes."""
    return weights_sha256({"tensor": tensor})


def content_sha256(value: Any) -> str:
    """Returns the SHA-256 of nested dicts, lists and tuples of tensors, strings, numbers, booleans and None."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add_tensor(digest: _Hash, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)


def _add(digest: _Hash, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, "tensor", value)
    elif isinstance(value, Mapping):
        digest.update(f"dict {len(value)};".encode())
        for pair in value.items():
            for part in pair:
                _add(digest, part)
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _add(digest, item)
    elif value is None or isinstance(value, bool | int | float | str):
        text = f"{type(value).__name__} {value!r}"
        digest.update(f"{len(text)} {text};".encode())
    else:
        raise TypeError(f"it holds a {type(value).__name__}")
