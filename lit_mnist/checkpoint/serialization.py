"""The bytes of a checkpoint: what torch.save writes, and what can be loaded again without executing code."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import NoneType
from typing import Any

import torch

from lit_mnist.checkpoint.placeholders import UnsafeError
from lit_mnist.checkpoint.safety import check_archive
from lit_mnist.errors import InputError

# The structures that were saved and accepted last.
_ACCEPTED: deque[Any] = deque(maxlen=8)
# In bits; the reader rejects longer numbers than this.
_SMALL_NUMBER = 64
# In characters; a list that contains itself has no innermost part.
_LONGEST_PLACE = 100


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
    content, structure = io.BytesIO(), None
    # Values that are nested too deeply have none; the check below names them.
    with suppress(Exception):
        structure = _structure(value, {})
    try:
        torch.save(value, content)
        # A run saves values of one structure again and again, and the check takes longer than torch.save.
        if structure is None or structure not in _ACCEPTED:
            check_archive(content)
    except Exception as error:
        return error
    if structure is not None and structure not in _ACCEPTED:
        _ACCEPTED.append(structure)
    return content.getbuffer()


def _structure(value: Any, storages: dict[int, int]) -> Any:
    """Returns what decides whether nested values can be loaded: all except the content of numbers, texts and tensors.

    Args:
        value: The values.
        storages: The storages of the tensors before, by address; of which tensors share one.

    Returns:
        The structure, or None if it is unusual.
    """
    kind = type(value)
    if kind in {float, bool, NoneType} or (kind is int and value.bit_length() <= _SMALL_NUMBER):
        return kind
    if kind is str:
        return kind, len(value)
    if kind is torch.Tensor and value.layout == torch.strided and not (vars(value) or value.is_quantized):
        storage = value.untyped_storage()
        number = storages.setdefault(storage.data_ptr(), len(storages))
        bits = (value.is_conj(), value.is_neg(), value.requires_grad)
        return value.dtype, value.device.type, value.shape, value.stride(), storage.nbytes(), number, bits
    if kind is dict and all(type(key) in {str, int} for key in value):
        parts = tuple(_structure(part, storages) for part in value.values())
        return None if None in parts else (kind, tuple(value), parts)
    if kind in {list, tuple}:
        parts = tuple(_structure(part, storages) for part in value)
        return None if None in parts else (kind, parts)
    return None


def _find_rejected(value: Any, place: str, error: Exception) -> tuple[str, Any, Exception]:
    """Returns where the innermost part is that is rejected, the part, and why."""
    if len(place) > _LONGEST_PLACE:
        return f"{place}…", value, error
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
