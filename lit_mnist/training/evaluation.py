"""Exact evaluation on any number of ranks, from sums that are reduced once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lit_mnist.data.loader import EvaluationBatches
from lit_mnist.errors import NonFiniteError
from lit_mnist.training.examples import Examples, Wrong

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

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


class EvaluationSums:
    """Accumulates the metrics of a split on one rank.

    Args:
        num_classes: Number of classes.
        device: Device of the sums.
        examples: Whether to keep examples of the samples; see `Examples`.

    Attributes:
        confusion: Number of predictions, by true class (rows) and predicted class (columns), int64 [classes, classes].
        sums: The sum of the cross-entropies in nats, and the number of samples, float64 [2]. In double precision, the
            order of the additions does not affect the metrics.
        examples: The examples, or None.
    """

    def __init__(self, num_classes: int, device: torch.device, *, examples: bool = False) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.examples = Examples() if examples else None

    def update(self, logits: torch.Tensor, targets: torch.Tensor, indices: torch.Tensor) -> None:
        """Adds a batch.

        Args:
            logits: Float [batch, classes].
            targets: Classes, int64 [batch].
            indices: Indices of the samples in the split, int64 [batch]; used for examples only.
        """
        confusion, sums = compute_batch_sums(logits, targets, len(self.confusion))
        self.confusion += confusion
        self.sums += sums
        if self.examples:
            self.examples.add(logits, targets, indices)

    def all_reduce(self) -> None:
        """Reduces the sums over all ranks; every rank must call it."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.confusion)
            dist.all_reduce(self.sums)

    def compute(self, expected: int | None) -> Evaluation:
        """Returns the metrics of the reduced sums, and the examples; every rank must call it.

        Args:
            expected: As for `compute_evaluation`.

        Raises:
            NonFiniteError: The loss is infinite or NaN.
        """
        examples = self.examples.gather() if self.examples else []
        evaluation = compute_evaluation(self.confusion, self.sums, expected)
        return replace(evaluation, examples=examples)


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


def name_metrics(evaluation: Evaluation, stage: str) -> dict[str, float]:
    """Returns the metrics to log, with the prefix `val` or `test` in their names."""
    return {f"{stage}_loss": evaluation.loss, f"{stage}_accuracy": evaluation.accuracy}


def check_count(trainer: Trainer, count: int) -> None:
    """Asserts that a Trainer has evaluated each sample of a split once, unless the loader is a user's own or limited.

    Args:
        trainer: The Trainer at the end of the evaluation.
        count: Number of samples evaluated on all ranks.
    """
    loader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
    if isinstance(loader, EvaluationBatches) and batches == [len(loader)]:
        assert count == len(loader.split), f"{count} samples were evaluated, but the split has {len(loader.split)}"


def predict_with_probability(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the predicted classes of each sample, and their probability.

    Args:
        logits: Float [batch, classes].

    Returns:
        Classes, int64 [batch]; probabilities, float32 [batch].
    """
    probability, predicted = logits.float().softmax(dim=1).max(dim=1)
    return predicted, probability
