"""The evaluation loop of the hand-written engines; raw DDP writes out its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lit_mnist.data.dataset import Split
from lit_mnist.distributed.rank import Rank
from lit_mnist.models.sync_batch_norm import sync_buffers
from lit_mnist.training.evaluation import Evaluation, EvaluationSums, Prediction, predict_with_probability
from lit_mnist.training.job import Job
from lit_mnist.training.precision import autocast


@torch.no_grad()
def evaluate(job: Job, rank: Rank, net: nn.Module, split: Split, *, keep_examples: bool = False) -> Evaluation:
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
def predict(job: Job, rank: Rank, net: nn.Module) -> Iterator[Prediction]:
    """Yields the predictions of this rank's part of the test split, batch by batch."""
    device = job.devices.of(rank)
    net.eval()
    for batch in job.evaluation_batches(job.splits.test, rank):
        with autocast(job.precision, device):
            logits = net(batch.images.to(device), None)
        yield batch.indices, *predict_with_probability(logits)
