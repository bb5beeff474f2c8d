"""Digests of weights and of nested values, the same on every machine."""

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
    """Returns the SHA-256 of a tensor's type, shape and contiguous little-endian bytes."""
    digest = hashlib.sha256()
    _add_tensor(digest, "tensor", tensor)
    return digest.hexdigest()


def content_sha256(value: Any) -> str:
    """Returns the SHA-256 of nested dicts, lists and tuples of tensors, strings, numbers, booleans and None."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def _add_tensor(digest: _Hash, name: str, tensor: torch.Tensor) -> None:
    shape = tuple(tensor.shape)
    digest.update(f"{name}|{tensor.dtype}|{shape}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)


def _add(digest: _Hash, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, "tensor", value)
    elif isinstance(value, Mapping):
        digest.update(f"dict {len(value)};".encode())
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _add(digest, item)
    elif value is None or isinstance(value, bool | int | float | str):
        text = f"{type(value).__name__} {value!r}"
        digest.update(f"{len(text)} {text};".encode())
    else:
        raise TypeError(f"a {type(value).__name__} is no plain value")
