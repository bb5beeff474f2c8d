"""The metrics of a training run, in a file of its own: Lightning and torchmetrics take as long to import as torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


class TrainMetrics:
    """Logs the loss and the accuracy of a training run over all ranks, and the learning rate.

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

    def log(
        self, module: LightningModule, loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, batch_idx: int
    ) -> None:
        """Adds a micro-batch, and logs the metrics of the first, of every nth, and of the last step of an epoch.

        Args:
            module: The module that trains.
            loss: Mean loss of the micro-batch, a scalar.
            logits: Its logits, float [batch, classes].
            targets: Its classes, int64 [batch].
            batch_idx: Its number in the epoch.
        """
        self.update(loss)
        if self.is_due(module, batch_idx):
            lr = module.trainer.optimizers[0].param_groups[0]["lr"]
            values = {**self.compute(logits, targets), "lr": lr}
            module.log_dict(
                {name: torch.tensor(value, dtype=torch.float64, device=loss.device) for name, value in values.items()}
            )

    @staticmethod
    def is_due(module: LightningModule, batch_idx: int) -> bool:
        """Returns whether the metrics of a micro-batch are logged; see `log`."""
        trainer: Any = module.trainer
        step, last = trainer.global_step + 1, batch_idx + 1 == trainer.num_training_batches
        ends_step = last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        every = trainer.log_every_n_steps
        return ends_step and bool(last or step == 1 or (every > 0 and step % every == 0))

    def compute(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        """Returns `train_loss`, the mean since the last call, and `train_accuracy`, of the last micro-batch.

        Both are over all ranks: every rank must call it.

        Args:
            logits: Logits of the last micro-batch, float [batch, classes].
            targets: Classes of the last micro-batch, int64 [batch].
        """
        mean = torch.stack(self._losses).double().mean()
        self._losses = []
        correct = (logits.detach().argmax(dim=1) == targets).sum().double()
        sums = torch.stack([mean, correct, torch.full_like(correct, len(targets))])
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if world_size > 1:
            dist.all_reduce(sums)
        loss, correct_predictions, count = sums.tolist()
        return {"train_loss": loss / world_size, "train_accuracy": correct_predictions / max(count, 1)}
