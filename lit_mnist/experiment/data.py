"""The section `data`: the data set, its split, its augmentation and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require
from lit_mnist.run.bounds import check_bounds

_EVALUATION_BATCH = 1000
Name = Literal["mnist", "fashion_mnist", "kmnist", "qmnist", "emnist"]


@dataclass(frozen=True)
class DataSettings:
    """The data set, its split, its augmentation and its batches.

    Args:
        name: `mnist` (embedded in the package), or `fashion_mnist`, `kmnist`, `qmnist`, `emnist` (downloaded once).
        root: Folder of the data files. By default, MNIST comes from the package, the others from the user's cache.
        emnist_split: The split of EMNIST, if `name` is `emnist`.
        batch_size: Samples of one micro-batch over all ranks (or of one rank: see `batch_per`).
        batch_per: `global`: `batch_size` counts the samples of all ranks; `rank`: those of each rank.
        eval_batch_size: Samples that a rank evaluates at once; it does not affect the result. Unset: 1000.
        val_size: Samples of the training set to validate on; 0 for none.
        train_size: Train on the first samples only, after the validation split is taken.
        test_size: Test on the first samples only.
        augment: `none`, `shift` (whole pixels) or `affine` (rotation, scale and sub-pixel shift).
        max_shift: Largest shift in pixels, in each direction, of `shift` and `affine`.
        max_rotate: Largest rotation in degrees, in each direction, of `affine`.
        max_scale: Largest relative change of size of `affine`: 0.1 is from 0.9 to 1.1.
        pipeline: `batched`: converts a batch of images at once; `per_sample`: converts image by image with PIL and
            torchvision, as most scripts do. It is slower, and equal up to rounding.
        workers: Worker processes of each rank that load ahead, with `per_sample`. 0: the rank loads the samples itself.
    """

    name: Name = "mnist"
    root: str | None = None
    emnist_split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    batch_size: int = 64
    batch_per: Literal["global", "rank"] = "global"
    eval_batch_size: int | None = None
    val_size: int = 5000
    train_size: int | None = None
    test_size: int | None = None
    augment: Literal["none", "shift", "affine"] = "none"
    max_shift: int = 2
    max_rotate: float = 10.0
    max_scale: float = 0.1
    pipeline: Literal["batched", "per_sample"] = "batched"
    workers: int = 0

    def __post_init__(self) -> None:
        check_bounds("data", self, "batch_size", "eval_batch_size", "train_size", "test_size", low=1)
        check_bounds("data", self, "val_size", low=0)
        check_bounds("data", self, "max_shift", low=0, high=14)
        check_bounds("data", self, "max_rotate", low=0, high=180)
        check_bounds("data", self, "workers", low=0, high=64)
        require(0 <= self.max_scale < 1, f"data.max_scale must be at least 0 and below 1, but is {self.max_scale}.")
        require(
            self.workers == 0 or not self.batched,
            f"data.workers {self.workers} needs data.pipeline per_sample: the batched pipeline has no workers.",
        )

    @property
    def batched(self) -> bool:
        """Whether batches are taken from images in memory, not loaded sample by sample."""
        return self.pipeline == "batched"

    @property
    def evaluation_batch(self) -> int:
        """Samples that a rank evaluates at once."""
        return self.eval_batch_size or _EVALUATION_BATCH
