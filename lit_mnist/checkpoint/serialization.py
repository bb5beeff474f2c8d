"""The bytes of a checkpoint: what torch.save writes, and what can be loaded again without executing code."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lit_mnist.checkpoint.placeholders import UnsafeError
from lit_mnist.checkpoint.safety import check_archive
from lit_mnist.errors import InputError


def serialize(checkpoint: Mapping[str, Any]) -> memoryview:
    """Returns the bytes of torch.save, which the reader of this project accepts.

    Raises:
        InputError: There is a value that it would not accept; the message names it.
    """
    content = _loadable(checkpoint)
    if isinstance(content, memoryview):
        return content
    place, value, error = _find_rejected(checkpoint, "checkpoint", content)
    if isinstance(error, UnsafeError) and not error.names:
        raise InputError(f"{place} could not be loaded again: {error}.") from error
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise InputError(
        f"{place} is a {kind}, which cannot be loaded with weights_only=True. Save plain values and tensors "
        "instead, or allow its class, and the classes of its attributes, with torch.serialization.add_safe_globals."
    ) from error


def plain_values(value: Any, *, copy: bool = False) -> Any:
    """Converts nested values to plain dicts, lists and tuples, and copies the tensors to the CPU if `copy` is set."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copy else value
    if isinstance(value, Mapping):
        return {key: plain_values(part, copy=copy) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain_values(part, copy=copy) for part in value)
    return value


def _loadable(value: Any) -> memoryview | Exception:
    """Returns the bytes of torch.save, or why they cannot be written, or not be loaded again."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
        check_archive(content)
    except Exception as error:
        return error
    return content.getbuffer()


def _find_rejected(value: Any, place: str, error: Exception) -> tuple[str, Any, Exception]:
    """Returns where the innermost part is that is rejected, the part, and why."""
    parts: Iterable[tuple[Any, Any]] = ()
    if type(value) in {list, tuple}:
        parts = enumerate(value)
    elif isinstance(value, Mapping):
        parts = value.items()
    for key, part in parts:
        if isinstance(reason := _loadable(key), Exception):
            return f"A key of {place}", key, reason
        if isinstance(reason := _loadable(part), Exception):
            return _find_rejected(part, f"{place}[{key!r}]", reason)
    return place, value, error
