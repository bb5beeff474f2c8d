"""The loss and the accuracy of a training between two logged steps, over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lit_mnist.training.evaluation import predict_classes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainMetrics:
    """Accumulates the loss of each micro-batch on this rank; `update` never waits for the device.

    Attributes:
        last: The mean loss of the last micro-batch, a scalar.
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self.last = torch.tensor(0.0)

    def update(self, loss: torch.Tensor) -> None:
        """Adds the mean loss of a micro-batch, a scalar that nobody changes afterwards."""
        self.last = loss.detach()
        self._losses.append(self.last)

    def is_logged(self, trainer: Trainer, batch_idx: int) -> bool:
        """Returns whether a micro-batch ends a step that a Trainer logs: the first, every nth, an epoch's last."""
        step, last = trainer.global_step + 1, batch_idx + 1 == trainer.num_training_batches
        ends_step = last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined] # Lightning sets it elsewhere
        return ends_step and (last or step == 1 or (every > 0 and step % every == 0))

    def compute(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        """Returns the mean loss since the last call and the accuracy of the last micro-batch, over all ranks.

        It is a collective: every rank must call it, and gets the same values.

        Args:
            logits: Of the last micro-batch, float [batch, classes] or [batch, classes, height, width].
            targets: Its classes, int64 [batch] or [batch, height, width].

        Returns:
            `train_loss` in nats, and `train_accuracy` from 0 to 1.
        """
        mean_loss = torch.stack(self._losses).double().mean()
        self._losses = []
        predicted, true = predict_classes(logits.detach(), targets)
        correct = (predicted == true).sum().double()
        sums = torch.stack([mean_loss, correct, torch.full_like(correct, len(true))])
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size > 1:
            dist.all_reduce(sums)
        loss, correct_predictions, count = sums.tolist()
        return {"train_loss": loss / world_size, "train_accuracy": correct_predictions / max(count, 1)}
