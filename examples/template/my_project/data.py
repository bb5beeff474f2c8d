"""The data. Replace `make_points` with yours: any map-style data set works."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.errors import InputError


class LitData(LightningDataModule):
    """Noisy points on three rings.

    Args:
        batch_size: Global batch: the samples of all ranks in one step.
    """

    def __init__(self, batch_size: int = 48) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        # Each rank builds the same data: a fixed seed for each part.
        self.train, self.val, self.test = make_points(1152, seed=1), make_points(301, seed=2), make_points(301, seed=3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self._batch_per_rank(), shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self._batch_per_rank())

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self._batch_per_rank())

    def predict_dataloader(self) -> DataLoader:
        return self.test_dataloader()

    def _batch_per_rank(self) -> int:
        """Divides the global batch by the ranks, so that their number does not change what is trained."""
        ranks = self.trainer.world_size
        if self.batch_size % ranks:
            raise InputError(f"The batch of {self.batch_size} samples cannot be split over {ranks} ranks.")
        return self.batch_size // ranks


def make_points(count: int, seed: int) -> TensorDataset:
    """Returns pairs of a point, float [2], and the number of its ring, 0 to 2."""
    generator = torch.Generator().manual_seed(seed)
    rings = torch.arange(count) % 3
    angles = 2 * torch.pi * torch.rand(count, generator=generator)
    radii = 1 + rings + 0.3 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1), rings)
