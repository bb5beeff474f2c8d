"""A batch, and its transfer to the device of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lit_mnist.distributed.rng import RandomKey
from lit_mnist.errors import InputError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

CPU = torch.device("cpu")
_NO_INDICES = torch.empty(0, dtype=torch.int64)


class Batch(NamedTuple):
    """The share of one rank of a micro-batch.

    Attributes:
        images: Normalized images, float [batch, 1, 28, 28].
        targets: Classes, int64 [batch].
        indices: Indices of the samples in their split, int64 [batch], on the CPU.
        rng: Identifies the random numbers of this micro-batch; None outside of training.
    """

    images: torch.Tensor
    targets: torch.Tensor
    indices: torch.Tensor
    rng: RandomKey | None

    @classmethod
    def of(cls, module: LightningModule, value: Any) -> Batch:
        """Converts what a loader of a LightningModule yields; a training batch gets the key of its random numbers.

        Args:
            module: The module, whose hyperparameter `seed` determines the random numbers.
            value: A batch, (images, targets), or images of a prediction.

        Raises:
            InputError: The batch has another form.
        """
        trainer = module.trainer
        if isinstance(value, cls):
            batch = value
        elif trainer.predicting and isinstance(value, torch.Tensor):
            batch = cls(value, value, _NO_INDICES, None)
        elif isinstance(value, list | tuple) and sum(isinstance(part, torch.Tensor) for part in value[:2]) == 2:
            batch = cls(value[0], value[1], _NO_INDICES, None)
        else:
            raise InputError(f"A batch must be (images, targets), but is a {type(value).__name__}.")
        if trainer.training and batch.rng is None:
            samples, first = len(batch.images), trainer.global_rank * len(batch.images)
            rows = torch.arange(first, first + samples, device=batch.images.device)
            number, size = trainer.fit_loop.total_batch_idx, trainer.world_size * samples
            batch = batch._replace(rng=RandomKey(module.hparams["seed"], number, size, rows))
        return batch

    def to(self, device: torch.device, *, training: bool = False) -> Batch:
        """Returns the batch on a device. The indices stay on the CPU.

        Args:
            device: The device.
            training: Whether a Trainer trains with the batch. On a GPU, it has then no indices: DDP would also
                copy and synchronize them, and only a test uses them.
        """
        if self.images.device != device:
            rng = self.rng and self.rng._replace(rows=to_device(self.rng.rows, device))
            images, targets = to_device(self.images, device), to_device(self.targets, device)
            moved = self._replace(images=images, targets=targets, rng=rng)
        else:
            moved = self
        return moved._replace(indices=moved.targets[:0]) if training and device.type == "cuda" else moved


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to a device without blocking the CPU.

    The copy uses pinned memory: from pageable memory, the CPU would wait for everything queued on the GPU.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
