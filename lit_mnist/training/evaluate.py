"""The evaluation and the prediction that the hand-written engines share; raw DDP writes its evaluation out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lit_mnist.data.dataset import AnySplit
from lit_mnist.distributed.rank import Rank
from lit_mnist.models.sync_batch_norm import broadcast_buffers
from lit_mnist.training.evaluation import Evaluation, EvaluationSums, Prediction, predictions_of
from lit_mnist.training.examples import Example
from lit_mnist.training.job import Job
from lit_mnist.training.precision import autocast


@torch.no_grad()
def evaluate(
    job: Job, rank: Rank, net: nn.Module, split: AnySplit, examples: list[Example] | None = None
) -> Evaluation:
    """Evaluates a split on all ranks; every rank must call it, and gets the same metrics.

    Each sample is on one rank only. The ranks may have different numbers of samples, and nothing is padded.

    Args:
        job: The job.
        rank: This rank.
        net: The bare network, on this rank's device.
        split: The samples.
        examples: A list that receives examples of the samples, or None.
    """
    device = job.devices.of(rank)
    sums = EvaluationSums(job.dataset.num_classes, device, examples=examples is not None)
    net.eval()
    broadcast_buffers(net)
    for batch in job.evaluation_batches(split, rank):
        images, targets, indices, _ = batch.to(device)
        with autocast(job.precision, device):
            logits = net(images)
        sums.update(logits, targets, indices)
    sums.all_reduce()
    if sums.examples and examples is not None:
        examples += sums.examples.gather()
    return sums.compute(len(split))


@torch.no_grad()
def predict(job: Job, rank: Rank, net: nn.Module) -> Iterator[Prediction]:
    """Gives the predictions of this rank's part of the test split, batch by batch; arguments as of `evaluate`."""
    device = job.devices.of(rank)
    net.eval()
    for batch in job.evaluation_batches(job.splits.test, rank):
        with autocast(job.precision, device):
            logits = net(batch.images.to(device))
        yield batch.indices, *predictions_of(logits)
