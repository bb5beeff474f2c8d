"""The evaluation loop of the hand-written engines; raw DDP writes out its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from lit_mnist.checkpoint.format import BEST, read_checkpoint
from lit_mnist.data.dataset import AnySplit
from lit_mnist.distributed.buffers import sync_buffers
from lit_mnist.distributed.precision import autocast
from lit_mnist.distributed.rank import Rank
from lit_mnist.training.evaluation import Evaluation, EvaluationSums, Prediction, predict_with_probability
from lit_mnist.training.job import ExperimentJob
from lit_mnist.training.state import net_weights


@torch.no_grad()
def evaluate(
    job: ExperimentJob, rank: Rank, net: nn.Module, split: AnySplit, *, keep_examples: bool = False
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
