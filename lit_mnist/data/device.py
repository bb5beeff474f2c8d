"""Data on a rank's device: a batch, images that stay there, and copies for which the host does not wait."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lit_mnist.data.digits.idx import Split
from lit_mnist.data.rng import Draw
from lit_mnist.errors import InputError

CPU = torch.device("cpu")


class Batch(NamedTuple):
    """One rank's part of a micro-batch.

    Attributes:
        images: Normalised images, float [batch, 1, 28, 28], or for segmentation [batch, 3, height, width].
        targets: Classes, int64 [batch], or for segmentation [batch, height, width], `IGNORED` where a pixel has none.
        indices: The samples' numbers in their split, int64 [batch].
        draw: The random numbers of this micro-batch, in training only.
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: torch.Tensor
    draw: Draw | None

    @classmethod
    def of(cls, value: Any) -> Batch:
        """Returns a batch of a user's own loader, (images, targets), as one of this kind; its indices are empty.

        Raises:
            InputError: It has another form.
        """
        if isinstance(value, cls):
            return value
        pair = value if isinstance(value, list | tuple) else ()
        if len(pair) < 2 or not all(isinstance(part, torch.Tensor) for part in pair[:2]):
            raise InputError(f"A batch must be (images, targets), but is a {type(value).__name__}.")
        return cls(pair[0], pair[1], torch.empty(0, dtype=torch.int64), None)

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device, or itself where it is there; the indices are for the host, and stay."""
        if self.images.device == device:
            return self
        draw = self.draw and self.draw._replace(rows=moved(self.draw.rows, device))
        return self._replace(images=moved(self.images, device), targets=moved(self.targets, device), draw=draw)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor on a device, or itself where it is there already.

    A GPU's copy from pageable memory makes the host wait for all that was queued before: it goes through pinned memory.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def resident(split: Split, device: torch.device) -> Split:
    """Returns a split on a device, moved there when it is first asked for, and kept for all epochs that come."""
    return split if split.images.device == device else _resident(split, device)


# As many as an experiment has: to train, to validate and to test on.
@lru_cache(maxsize=3)
def _resident(split: Split, device: torch.device) -> Split:
    return Split(split.images.to(device), split.labels.to(device))
