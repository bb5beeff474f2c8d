"""The LightningDataModule: Pascal VOC 2012 if its folder is given, otherwise generated shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image, ImageDraw, ImageFilter
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import VOCSegmentation
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from lit_mnist.errors import InputError
from lit_mnist.order import Indices, derive_seed, uniform, validation_split
from lit_mnist.plugins import ExactDistributedSampler, ResumableDataLoader

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet, as everywhere in torchvision


class SegmentationData(LightningDataModule):
    """Batches of images, float32 [batch, 3, size, size], and classes, int64 [batch, size, size]; 255 does not count.

    Args:
        root: The folder that contains `VOCdevkit/VOC2012` (21 classes). Without it, shapes are generated (4 classes).
            The masks of VOC's test set are not published: its `val` is the test split, and a part of `train` validates.
        batch_size: Images of a batch over all ranks.
        val_size: Images of the training set to validate on.
        size: Height and width of the images in pixels.
        train_size: Number of generated training images.
        test_size: Number of generated test images.
        num_workers: Worker processes of each rank.
        seed: Seed of the split, the order, the crops and the shapes; by default that of `seed_everything`.
    """

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 16,
        val_size: int = 100,
        size: int = 64,
        train_size: int = 900,
        test_size: int = 200,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seed = torch.initial_seed() if seed is None else seed

    def setup(self, stage: str) -> None:
        """Finds the images, and splits them."""
        hp = self.hparams
        if hp.root is None:
            train: Any = Shapes(hp.train_size, hp.size, derive_seed(self.seed, "shapes", 0))
            test: Any = Shapes(hp.test_size, hp.size, derive_seed(self.seed, "shapes", 1))
        else:
            try:
                train, test = (VOCSegmentation(hp.root, "2012", image_set) for image_set in ("train", "val"))
            except RuntimeError as error:
                raise InputError(f"data.root: {hp.root} does not contain VOCdevkit/VOC2012.") from error
        rows, val_rows = validation_split(self.seed, len(train), hp.val_size)
        self.train = Squares(train, rows, hp.size, self.seed)
        self.val = Squares(train, val_rows, hp.size)
        self.test = Squares(test, np.arange(len(test)), hp.size)

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the training batches of this rank."""
        sampler = ExactDistributedSampler(self.train, self.hparams.batch_size, self.seed)
        return ResumableDataLoader(self.train, batch_sampler=sampler, num_workers=self.hparams.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        """Returns the validation batches of this rank."""
        return self._evaluation(self.val)

    def test_dataloader(self) -> DataLoader[Any]:
        """Returns the test batches of this rank."""
        return self._evaluation(self.test)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Returns the batches of the test split to predict on this rank."""
        return self._evaluation(self.test)

    def _evaluation(self, squares: Squares) -> DataLoader[Any]:
        sampler = ExactDistributedSampler(squares, self.hparams.batch_size, evaluation=True)
        return DataLoader(squares, batch_sampler=sampler, num_workers=self.hparams.num_workers)


class Squares(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images in one size. With a seed, a crop and a flip that are functions of (seed, epoch, sample).

    Args:
        source: Pairs of an image and its mask, as PIL images.
        rows: The samples to use.
        size: Height and width of the results in pixels.
        seed: The seed of the augmentation; None for the whole images.
    """

    def __init__(self, source: Any, rows: Indices, size: int, seed: int | None = None) -> None:
        self.source, self.rows, self.size, self.seed = source, rows, size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the augmentation."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns an image, float32 [3, size, size], and its classes, int64 [size, size]."""
        image, mask = self.source[int(self.rows[index])]
        left, top, width, height = 0, 0, *image.size
        if self.seed is not None:
            part, right, down, flip = uniform(self.seed, "crop", self.epoch, index, np.arange(4))
            width, height = (round(side * (0.5 + 0.5 * part)) for side in image.size)
            left, top = round((image.width - width) * right), round((image.height - height) * down)
            if flip < 0.5:
                image, mask = transforms.horizontal_flip(image), transforms.horizontal_flip(mask)
        box, size = (top, left, height, width), [self.size, self.size]
        image = transforms.resized_crop(image, *box, size)
        mask = transforms.resized_crop(mask, *box, size, InterpolationMode.NEAREST)
        pixels = transforms.to_dtype(transforms.pil_to_tensor(image), torch.float32, scale=True)
        return transforms.normalize(pixels, MEAN, STD), torch.from_numpy(np.array(mask, np.int64))


class Shapes(Dataset[tuple[Image.Image, Image.Image]]):
    """Generated images: a circle, a square and a triangle (classes 1, 2, 3) on noise, with borders (255) in the mask.

    An image is a function of (seed, index). The colors tell nothing about the class.

    Args:
        count: Number of images.
        size: Height and width in pixels.
        seed: The seed.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, Image.Image]:
        """Returns an image and its mask."""
        side = self.size
        noise = uniform(self.seed, "noise", index, np.arange(side * side * 3)).reshape(side, side, 3)
        image = Image.fromarray((255 * noise).astype(np.uint8)).filter(ImageFilter.BoxBlur(1))
        mask = Image.new("L", image.size)
        for kind in (1, 2, 3):
            x, y, radius, *color = uniform(self.seed, "shape", index, kind, np.arange(6))
            radius *= side * 0.12
            radius += side * 0.12
            x, y = ((0.15 + 0.7 * center) * side for center in (x, y))
            fill = tuple(int(255 * each) for each in color)
            sides = {1: 48, 2: 4, 3: 3}[kind]
            for canvas, value, grown in ((mask, 255, 1.5), (mask, kind, -0.5), (image, fill, 0)):
                ImageDraw.Draw(canvas).regular_polygon((x, y, radius + grown), sides, fill=value)
        return image, mask
