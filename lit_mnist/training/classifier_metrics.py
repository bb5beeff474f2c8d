"""The metrics of an evaluation as a torchmetrics object, for Lightning."""

from __future__ import annotations

import torch
from torchmetrics import Metric

from lit_mnist.training.evaluation import Evaluation, compute_batch_sums, compute_evaluation


class ClassifierMetrics(Metric):
    """Computes the loss, the accuracy and the confusion matrix of a split from sums that are reduced over all ranks.

    Ranks may have different numbers of samples: no samples are padded, and no means are averaged.

    Args:
        num_classes: Number of classes.

    Attributes:
        confusion: Number of predictions, by true class (rows) and predicted class (columns), int64 [classes, classes].
        sums: The sum of the cross-entropies in nats, and the number of samples, float64 [2].
    """

    full_state_update = False
    confusion: torch.Tensor
    sums: torch.Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.add_state("confusion", confusion, dist_reduce_fx="sum")
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")
        self.segmentation = False

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds a batch.

        Args:
            logits: Float [batch, classes], or for segmentation [batch, classes, height, width].
            targets: Classes, int64 [batch] or [batch, height, width].
        """
        confusion, sums = compute_batch_sums(logits, targets, len(self.confusion))
        self.confusion += confusion
        self.sums += sums
        self.segmentation = targets.ndim > 1

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `confusion` and `sums` over all ranks. Every rank must call it."""
        return self.confusion, self.sums

    def evaluation(self) -> Evaluation:
        """Returns the metrics over all ranks. Every rank must call it.

        Raises:
            NonFiniteError: The loss is infinite or NaN; all ranks raise it together.
        """
        return compute_evaluation(*self.compute(), expected=None, segmentation=self.segmentation)
