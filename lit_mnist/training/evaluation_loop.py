"""The evaluation loop of the hand-written engines; raw DDP writes out its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from lit_mnist.checkpoint.format import BEST, read_checkpoint
from lit_mnist.data.dataset import Split
from lit_mnist.distributed.buffers import sync_buffers
from lit_mnist.distributed.precision import autocast
from lit_mnist.distributed.rank import Rank
from lit_mnist.training.evaluation import (
    Evaluation,
    Prediction,
    compute_batch_sums,
    compute_evaluation,
    predict_with_probability,
)
from lit_mnist.training.examples import Examples
from lit_mnist.training.job import ExperimentJob
from lit_mnist.training.state import net_weights


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


@torch.no_grad()
def evaluate(
    job: ExperimentJob, rank: Rank, net: nn.Module, split: Split, *, keep_examples: bool = False
) -> Evaluation:
    """Evaluates a split; every rank must call it, and gets the same metrics.

    Each sample is evaluated on one rank. Ranks may have different numbers of samples; no samples are padded.

    Args:
        job: The job.
        rank: This rank.
        net: The bare network, on this rank's device.
        split: The samples.
        keep_examples: Whether the result has examples of the samples.
    """
    device = job.devices.of(rank)
    sums = EvaluationSums(job.dataset.num_classes, device, examples=keep_examples)
    net.eval()
    sync_buffers(net)
    for batch in job.evaluation_batches(split, rank):
        images, targets, indices, _ = batch.to(device)
        with autocast(job.precision, device):
            logits = net(images, None)
        sums.update(logits, targets, indices)
    sums.all_reduce()
    return sums.compute(len(split))


@torch.no_grad()
def predict(job: ExperimentJob, rank: Rank, net: nn.Module) -> Iterator[Prediction]:
    """Yields the predictions of this rank's part of the test split, batch by batch."""
    device = job.devices.of(rank)
    net.eval()
    for batch in job.evaluation_batches(job.splits.test, rank):
        with autocast(job.precision, device):
            logits = net(batch.images.to(device), None)
        yield batch.indices, *predict_with_probability(logits)


def load_best_weights(job: ExperimentJob, rank: Rank, net: nn.Module) -> None:
    """Loads the best weights of the run; every rank must call it. Only rank 0 can rely on the file being there."""
    if rank.is_first:
        net.load_state_dict(net_weights(read_checkpoint(job.folder / "checkpoints" / BEST)))
    if rank.world_size > 1:
        for tensor in net.state_dict().values():
            dist.broadcast(tensor, src=0)
