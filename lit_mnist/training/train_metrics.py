"""The training loss and accuracy of the logged steps, over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainMetrics:
    """Accumulates the losses of the micro-batches on this rank.

    Attributes:
        last: Mean loss of the last micro-batch, a scalar.
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self.last = torch.tensor(0.0)

    def update(self, loss: torch.Tensor) -> None:
        """Adds the mean loss of a micro-batch without waiting for the device. It must not be modified later."""
        self.last = loss.detach()
        self._losses.append(self.last)

    def is_logged(self, trainer: Trainer, batch_idx: int) -> bool:
        """Returns whether a micro-batch ends a logged step: the first, every nth, and the last of an epoch."""
        step, last = trainer.global_step + 1, batch_idx + 1 == trainer.num_training_batches
        ends_step = last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined] # Lightning sets it elsewhere
        return ends_step and (last or step == 1 or (every > 0 and step % every == 0))

    def compute(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        """Returns the mean loss since the last call and the accuracy of the last micro-batch, over all ranks.

        Every rank must call it.

        Args:
            logits: Logits of the last micro-batch, float [batch, classes].
            targets: Classes of the last micro-batch, int64 [batch].

        Returns:
            `train_loss` in nats, and `train_accuracy` from 0 to 1.
        """
        mean_loss = torch.stack(self._losses).double().mean()
        self._losses = []
        correct = (logits.detach().argmax(dim=1) == targets).sum().double()
        sums = torch.stack([mean_loss, correct, torch.full_like(correct, len(targets))])
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size > 1:
            dist.all_reduce(sums)
        loss, correct_predictions, count = sums.tolist()
        return {"train_loss": loss / world_size, "train_accuracy": correct_predictions / max(count, 1)}
