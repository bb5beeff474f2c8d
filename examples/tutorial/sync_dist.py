"""Lightning validates 25 samples on two ranks, 13 and 12, with a network that is always right.

python -m examples.tutorial.sync_dist --bug    the accuracy is logged with sync_dist=True
python -m examples.tutorial.sync_dist          the accuracy is an exact metric
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank
from lit_mnist.plugins import ExactDistributedSampler, exact_metric

SAMPLES, BATCH = 25, 26
BUG = "--bug" in sys.argv


def correct(predicted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns 1 for each sample that is classified correctly and 0 for the others."""
    return (predicted == labels).double()


class AlwaysRight(LightningModule):
    """A classifier that is told the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = exact_metric(correct, expected=SAMPLES)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Evaluates a batch."""
        (labels,) = batch
        if BUG:
            self.log("accuracy", correct(labels, labels).mean(), sync_dist=True, on_epoch=True)
        else:
            self.accuracy.update(labels, labels)

    def on_validation_epoch_end(self) -> None:
        """Combines the ranks' sums and counts."""
        if not BUG:
            self.log("accuracy", self.accuracy.result())


def validate(rank: Rank) -> None:
    """The work of each rank."""
    dataset = TensorDataset(torch.arange(SAMPLES) % 10)
    sampler = ExactDistributedSampler(dataset, BATCH, evaluation=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=rank.world_size,
        strategy="ddp",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    (metrics,) = trainer.validate(AlwaysRight(), DataLoader(dataset, batch_sampler=sampler), verbose=False)
    if rank.is_first:
        print(f"accuracy {metrics['accuracy']:.2%}")


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        launch(validate, world_size=2, max_restarts=0, logs=Path(folder))
