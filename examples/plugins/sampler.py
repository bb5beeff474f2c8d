"""ExactDistributedSampler: the batches of 64 samples are the same on any number of ranks."""

from __future__ import annotations

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples.plugins.classifier import Classifier, options, points
from lit_mnist.plugins import ExactDistributedSampler


def main(devices: int = 2) -> None:
    """Trains two epochs."""
    dataset = points(1000, seed=1)
    loader = DataLoader(dataset, batch_sampler=ExactDistributedSampler(dataset, batch_size=64, seed=1))
    trainer = Trainer(**options(devices), use_distributed_sampler=False, enable_checkpointing=False)
    trainer.fit(Classifier(), loader)
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps of {64 // devices} samples")


if __name__ == "__main__":
    main()
