"""Exact evaluation on any number of ranks, from sums that are reduced once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lit_mnist.errors import NonFiniteError

if TYPE_CHECKING:
    from lit_mnist.training.examples import Wrong

# The names of the validation metrics; the last one selects the best weights.
VALIDATION_METRICS = ("val_loss", "val_accuracy")
# Indices int64 [batch], predicted classes int64 [batch], probabilities float32 [batch].
Prediction = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a whole split.

    Attributes:
        accuracy: Share of correct predictions, from 0 to 1.
        loss: Mean cross-entropy per prediction in nats.
        count: Number of samples.
        per_class: Accuracy of each class; 0 for a class without predictions.
        confusion: Number of predictions, by true class (rows) and predicted class (columns).
        examples: Samples for the report, if they were kept.
    """

    accuracy: float
    loss: float
    count: int
    per_class: list[float]
    confusion: list[list[int]]
    examples: list[Wrong] = field(default_factory=list, compare=False)

    @property
    def score(self) -> float:
        """The metric that selects the best weights: the accuracy."""
        return self.accuracy

    def to_dict(self) -> dict[str, Any]:
        """Returns the metrics as plain values."""
        return {name: value for name, value in vars(self).items() if name != "examples"}


def compute_batch_sums(
    logits: torch.Tensor, targets: torch.Tensor, num_classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the summands of a batch for `confusion` and `sums` of `EvaluationSums`."""
    logits = logits.float() if logits.dtype in {torch.float16, torch.bfloat16} else logits
    confusion = (
        (targets * num_classes + logits.argmax(dim=1)).bincount(minlength=num_classes**2).view(num_classes, num_classes)
    )
    loss = F.cross_entropy(logits, targets, reduction="sum").double()
    return confusion, torch.stack([loss, torch.full_like(loss, len(targets))])


def compute_evaluation(confusion: torch.Tensor, sums: torch.Tensor, expected: int | None) -> Evaluation:
    """Computes the metrics from the sums of all ranks.

    All metrics but the loss are computed from the confusion matrix, so that they cannot contradict each other. Accuracy
    is the micro average of torchmetrics.

    Args:
        confusion: Number of predictions, by true class (rows) and predicted class (columns), int64 [classes, classes].
        sums: The sum of the cross-entropies in nats, and the number of samples, float64 [2].
        expected: Number of samples in the split; None if it is unknown or only a part was evaluated.

    Raises:
        NonFiniteError: The loss is infinite or NaN.
    """
    confusion = confusion.long().cpu()
    loss_sum, samples = sums.tolist()
    assert expected in {samples, None}, f"{samples:.0f} samples were evaluated, but the split has {expected}"
    counted = max(int(samples), 1)
    loss = loss_sum / counted
    if not math.isfinite(loss):
        raise NonFiniteError("The network's outputs are not finite: the training has diverged; lower --lr.")
    correct, of_class = confusion.diagonal().double(), confusion.sum(dim=1)
    return Evaluation(
        accuracy=float(correct.sum() / counted),
        loss=loss,
        count=int(samples),
        per_class=(correct / of_class.clamp(min=1)).tolist(),
        confusion=confusion.tolist(),
    )


def predict_with_probability(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the predicted classes of each sample, and their probability.

    Args:
        logits: Float [batch, classes].

    Returns:
        Classes, int64 [batch]; probabilities, float32 [batch].
    """
    probability, predicted = logits.float().softmax(dim=1).max(dim=1)
    return predicted, probability
