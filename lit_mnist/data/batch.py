"""A batch, and the transfer of data to the device of a rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lit_mnist.data.rng import Draw
from lit_mnist.errors import InputError

CPU = torch.device("cpu")


class Batch(NamedTuple):
    """The part of a micro-batch that one rank has.

    Attributes:
        images: Normalized images, float [batch, 1, 28, 28], or for segmentation [batch, 3, height, width].
        targets: Classes, int64 [batch], or for segmentation [batch, height, width], where pixels that do not count are
            `IGNORED`.
        indices: Indices of the samples in their split, int64 [batch], on the CPU.
        draw: The random numbers of this micro-batch, in training only.
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: torch.Tensor
    draw: Draw | None

    @classmethod
    def of(cls, value: Any) -> Batch:
        """Converts a batch of a user's own loader, (images, targets), which leaves `indices` empty.

        Raises:
            InputError: The batch has another form.
        """
        if isinstance(value, cls):
            return value
        pair = value if isinstance(value, list | tuple) else ()
        if len(pair) < 2 or not all(isinstance(part, torch.Tensor) for part in pair[:2]):
            raise InputError(f"A batch must be (images, targets), but is a {type(value).__name__}.")
        return cls(pair[0], pair[1], torch.empty(0, dtype=torch.int64), None)

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device. The indices stay on the CPU."""
        if self.images.device == device:
            return self
        draw = self.draw and self.draw._replace(rows=to_device(self.draw.rows, device))
        return self._replace(images=to_device(self.images, device), targets=to_device(self.targets, device), draw=draw)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor on a device; the CPU does not wait for the copy.

    The copy goes through pinned memory: from pageable memory, the CPU would wait for everything queued on the GPU.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
