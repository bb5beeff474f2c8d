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
    if isinstance(content, UnsafeError):
        raise InputError(f"The checkpoint would not be loaded again, since {content}.") from content
    place, value = _find_rejected(checkpoint, "checkpoint")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise InputError(
        f"{place} is a {kind}, which cannot be loaded with weights_only=True. Save plain values and tensors "
        "instead, or allow its class, and the classes of its attributes, with torch.serialization.add_safe_globals."
    )


def plain_values(value: Any, *, copy: bool = False) -> Any:
    """Converts nested values to plain dicts, lists and tuples, and copies the tensors to the CPU if `copy` is set."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copy else value
    if isinstance(value, Mapping):
        return {key: plain_values(part, copy=copy) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain_values(part, copy=copy) for part in value)
    return value


def _loadable(value: Any) -> memoryview | UnsafeError | None:
    """Returns the bytes of torch.save, None if a value in it is rejected, or why all of them together are."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        try:
            # Reads no tensor's bytes, which takes a hundredth of the time.
            torch.load(content, map_location="meta", weights_only=True)
        except NotImplementedError:
            # Sparse tensors cannot be loaded so.
            content.seek(0)
            torch.load(content, map_location="cpu", weights_only=True)
        check_archive(content)
    except UnsafeError as error:
        return error
    except Exception:
        return None
    return content.getbuffer()


def _find_rejected(value: Any, place: str) -> tuple[str, Any]:
    """Returns the innermost part that cannot be loaded, and where it is."""
    parts: Iterable[tuple[Any, Any]] = ()
    if type(value) in {list, tuple}:
        parts = enumerate(value)
    elif isinstance(value, Mapping):
        parts = value.items()
    for key, part in parts:
        if _loadable(key) is None:
            return f"A key of {place}", key
        if _loadable(part) is None:
            return _find_rejected(part, f"{place}[{key!r}]")
    return place, value
