"""The bytes of a checkpoint: what torch.save writes, and what can be loaded again without executing code."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, deque
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
# Far below the limits of the reader, which allows more values for each storage, and not for tensors that share one.
_FEW_VALUES, _FEW_CHARACTERS, _LITTLE_SHARED, _VALUES_OF_TENSOR = 30_000, 500_000, 2, 40
_DICTS = {dict, OrderedDict, Counter}
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
        structure = _Content().structure(value)
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


class _Content:
    """The values of a checkpoint, of which a structure says whether they can be loaded again.

    The structure has the types, the keys, and which tensors share memory, and neither numbers, texts nor shapes, which
    change from save to save. What the reader limits is counted beside it.
    """

    def __init__(self) -> None:
        self._values = self._characters = self._tensor_bytes = self._storage_bytes = 0
        # The numbers of the storages, by address.
        self._storages: dict[int, int] = {}

    def structure(self, value: Any) -> Any:
        """Returns the structure, or None if values are unusual or so many that the reader may reject them."""
        structure = self._of(value)
        few = self._values <= _FEW_VALUES and self._characters <= _FEW_CHARACTERS
        return structure if few and self._tensor_bytes <= _LITTLE_SHARED * self._storage_bytes else None

    def _of(self, value: Any) -> Any:
        self._values += 1
        kind = type(value)
        if kind in {float, bool, NoneType} or (kind is int and value.bit_length() <= _SMALL_NUMBER):
            return kind
        if kind is str:
            self._characters += len(value)
            return kind
        if kind is torch.Tensor:
            return self._of_tensor(value)
        if kind in _DICTS and set(map(type, value)) <= {str, int}:
            keys = tuple(value)
            self._values += len(keys)
            self._characters += len("".join(map(str, keys)))
            # The state_dict of a module has the versions of its layers as an attribute.
            attributes = getattr(value, "__dict__", None)
            parts = tuple(map(self._of, (*value.values(), attributes) if attributes else value.values()))
            return None if None in parts else (kind, keys, parts)
        if kind in {list, tuple}:
            parts = tuple(map(self._of, value))
            return None if None in parts else (kind, parts)
        return None

    def _of_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout != torch.strided or vars(tensor) or tensor.is_quantized:
            return None
        storage = tensor.untyped_storage()
        size, own = storage.nbytes(), tensor.numel() * tensor.itemsize
        if own > size or size % tensor.itemsize:
            return None
        if (address := storage.data_ptr()) in self._storages:
            self._values += _VALUES_OF_TENSOR
        else:
            self._storages[address] = len(self._storages)
            self._storage_bytes += size
        self._values += 2 * tensor.dim()
        self._tensor_bytes += own
        bits = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
        return tensor.dtype, tensor.device.type, tensor.dim(), self._storages[address], bits


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
