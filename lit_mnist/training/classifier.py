"""The parts of LitClassifier: loss, optimizer with schedule, and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torchmetrics import Metric

from lit_mnist.experiment.learning_rate import explain_peak, peak_lr
from lit_mnist.experiment.model import ModelSettings
from lit_mnist.plugins.verified_loading import VerifiedLoading
from lit_mnist.training.evaluation import (
    Evaluation,
    compute_batch_sums,
    compute_evaluation,
    predict_with_probability,
)
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import make_optimizer
from lit_mnist.training.schedule import make_schedule, schedule_length
from lit_mnist.training.train_metrics import TrainMetrics

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = [
    "ClassifierMetrics",
    "TrainMetrics",
    "VerifiedLoading",
    "configure_optimizer",
    "mean_loss",
    "predict_with_probability",
]


def configure_optimizer(net: nn.Module, settings: ModelSettings, trainer: Trainer, steps: int = 0) -> dict[str, Any]:
    """Returns the optimizer and its learning-rate schedule, as a LightningModule does.

    Args:
        net: The network.
        settings: The section `model`.
        trainer: The Trainer.
        steps: Optimizer steps of the run; 0 if the Trainer determines them.

    Raises:
        InputError: The schedule needs a last step, but the run has none.
    """
    length = schedule_length(settings, steps or trainer.estimated_stepping_batches)
    if reason := explain_peak(settings, trainer.world_size, length):
        rank_zero_info(reason)
    optimizer = make_optimizer(net, settings, peak_lr(settings, trainer.world_size, length))
    schedule = make_schedule(optimizer, settings, length)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ClassifierMetrics(Metric):
    """Computes the loss, the accuracy and the confusion matrix of a split from sums that are reduced over all ranks.

    Ranks may have different numbers of samples: no samples are padded, and no means are averaged.

    Args:
        num_classes: Number of classes.

    Attributes:
        confusion: Number of predictions, by true class (rows) and predicted class (columns), int64 [classes, classes].
        sums: The sum of the cross-entropies in nats, and the number of samples, float64 [2].
        last: The last evaluation, or None.
    """

    full_state_update = False
    confusion: torch.Tensor
    sums: torch.Tensor

    def __init__(self, num_classes: int) -> None:
        # A rank without samples never calls `update`, which invalidates the cache: it would skip the collective.
        super().__init__(compute_with_cache=False)
        confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.add_state("confusion", confusion, dist_reduce_fx="sum")
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")
        self.last: Evaluation | None = None

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds a batch: logits, float [batch, classes], and classes, int64 [batch]."""
        confusion, sums = compute_batch_sums(logits, targets, len(self.confusion))
        self.confusion += confusion
        self.sums += sums

    def compute(self) -> dict[str, torch.Tensor]:
        """Returns loss and accuracy over all ranks, float64. Every rank must call it.

        Raises:
            NonFiniteError: The loss is infinite or NaN; all ranks raise it together.
        """
        self.last = compute_evaluation(self.confusion, self.sums, expected=None)
        # Double precision represents each value exactly.
        values = torch.tensor([self.last.loss, self.last.accuracy], dtype=torch.float64, device=self.sums.device)
        return {"loss": values[0], "accuracy": values[1]}

    def log(self, module: LightningModule, stage: str) -> None:
        """Logs the metrics of an epoch with a prefix (`val` or `test`), and forgets its samples."""
        values = {f"{stage}_{name}": value for name, value in self.compute().items()}
        self.reset()
        if module.trainer.sanity_checking:
            self.last = None
        # The values are equal on all ranks. The maximum is exact; a mean would be rounded.
        module.log_dict(values, sync_dist=True, reduce_fx="max")

    def results(self) -> dict[str, Any] | None:
        """Returns the last evaluation for `result.json`, with the confusion matrix and the accuracy of each class."""
        return self.last.to_dict() if self.last else None
