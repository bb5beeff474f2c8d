"""The tensors of a batch, which may be nested in containers, and what identifies their content."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.plugins._private import tensor_version


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def versions_of(batch: Any) -> list[int]:
    """Returns how often each tensor of a batch was changed in place."""
    return [tensor_version(tensor) for tensor in tensors_of(batch)]


def digest_of(batch: Any, versions: list[int]) -> str | None:
    """Returns the SHA-256 of the tensors of a batch, or None if it has none, or if they were changed in place.

    Args:
        batch: The batch.
        versions: What `versions_of` returned for it when it was loaded.
    """
    tensors = tensors_of(batch)
    return content_sha256(tensors) if tensors and versions == versions_of(batch) else None
