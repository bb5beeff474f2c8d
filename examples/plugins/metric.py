"""exact_metric: one accuracy for 101 samples on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples.plugins.classifier import Classifier, options, points
from lit_mnist.plugins import ExactDistributedSampler, exact_metric


class Measured(Classifier):
    """The classifier with an exact validation accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = exact_metric(lambda logits, classes: logits.argmax(dim=1) == classes, expected=101)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Adds a batch."""
        inputs, classes = batch
        self.accuracy.update(self.net(inputs), classes)

    def on_validation_epoch_end(self) -> None:
        """Logs the accuracy over all samples of all ranks."""
        self.log("val_accuracy", self.accuracy.result(partial=self.trainer.sanity_checking))


def main(devices: int = 2) -> None:
    """Evaluates an untrained network."""
    torch.manual_seed(1)
    dataset = points(101, seed=2)
    loader = DataLoader(dataset, batch_sampler=ExactDistributedSampler(dataset, batch_size=20, evaluation=True))
    trainer = Trainer(**options(devices), use_distributed_sampler=False)
    found = trainer.validate(Measured(), loader, verbose=False)
    print(
        f"rank {trainer.global_rank}: {found[0]['val_accuracy']:.6f}, which is {found[0]['val_accuracy'] * 101:.0f}/101"
    )


if __name__ == "__main__":
    main()
