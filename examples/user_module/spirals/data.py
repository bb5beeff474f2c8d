"""A LightningDataModule that knows nothing of this project."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class SpiralsData(LightningDataModule):
    """Points on three spirals.

    Args:
        size: Number of points.
        batch_size: Points per batch and rank.
        noise: Standard deviation of the noise.
    """

    def __init__(self, size: int = 960, batch_size: int = 32, noise: float = 0.1) -> None:
        super().__init__()
        self.size, self.batch_size, self.noise = size, batch_size, noise

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        targets = torch.arange(self.size) % 3
        radius = torch.rand(self.size, generator=generator)
        angle = 4 * radius + 2 * torch.pi * targets / 3 + self.noise * torch.randn(self.size, generator=generator)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        parts = random_split(TensorDataset(points, targets), [0.6, 0.2, 0.2], generator=generator)
        self.train, self.val, self.test = parts

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return self._loader(self.test)

    def _loader(
        self, dataset: Dataset[tuple[torch.Tensor, ...]], *, shuffle: bool = False
    ) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=shuffle)
