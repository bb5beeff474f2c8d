"""The data. Replace `make_points` with yours: any map-style data set works."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.plugins import ExactDistributedSampler, ResumableDataLoader


class LitData(LightningDataModule):
    """Noisy points on three rings.

    Args:
        batch_size: Samples of a batch over all ranks.
        seed: Seed of the order.
    """

    def __init__(self, batch_size: int = 48, seed: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        # Each rank builds the same data: a fixed seed for each part.
        self.train, self.val, self.test = make_points(1152, seed=1), make_points(301, seed=2), make_points(301, seed=3)

    def train_dataloader(self) -> DataLoader:
        # Any number of ranks trains on the same batches, and a run that is killed resumes within an epoch.
        batches = ExactDistributedSampler(self.train, self.hparams.batch_size, self.hparams.seed)
        return ResumableDataLoader(self.train, batch_sampler=batches)

    # LitTrainer splits these over the ranks, without padding.
    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=100)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=100)

    def predict_dataloader(self) -> DataLoader:
        return self.test_dataloader()


def make_points(count: int, seed: int) -> TensorDataset:
    """Returns pairs of a point, float [2], and the number of its ring, 0 to 2."""
    generator = torch.Generator().manual_seed(seed)
    rings = torch.arange(count) % 3
    angles = 2 * torch.pi * torch.rand(count, generator=generator)
    radii = 1 + rings + 0.3 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1), rings)
