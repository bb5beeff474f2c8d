"""The section `data`: the data set, its split, its augmentation and its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require
from lit_mnist.experiment.task import Task, task_of
from lit_mnist.run.bounds import check_bounds


@dataclass(frozen=True)
class DataSettings:
    """The data set, its split, its augmentation and its batches.

    Args:
        name: Digits: `mnist` (embedded in the package), or `fashion_mnist`, `kmnist`, `qmnist`, `emnist` (downloaded
            once). Segmentation images: `voc2012` (Pascal VOC), or `shapes` (generated once).
        root: Folder of the data files. By default, MNIST comes from the package, the others from the user's cache.
        download: Whether to download `voc2012`, once, if its files are missing.
        emnist_split: The split of EMNIST, if `name` is `emnist`.
        batch_size: Samples of one micro-batch over all ranks (or of one rank: see `batch_per`).
        batch_per: `global`: `batch_size` counts the samples of all ranks; `rank`: those of each rank.
        eval_batch_size: Samples that a rank evaluates at once; it does not affect the result. Unset: 1000 digits, or 16
            segmentation images.
        val_size: Samples of the training set to validate on; 0 for none.
        train_size: Train on the first samples only, after the validation split is taken.
        test_size: Test on the first samples only.
        image_size: Height and width in pixels to which segmentation images are resized.
        border: Meaning of the pixels of value 255, which mark the border of an object in `voc2012` and `shapes`:
            `ignore`: they are excluded from the loss and the metrics; `class`: they are one more class.
        augment: For digits: `none`, `shift` (whole pixels) or `affine` (rotation, scale and sub-pixel shift). For
            segmentation images: `none` or `crop` (random scale, position and flip).
        max_shift: Largest shift in pixels, in each direction, of `shift` and `affine`.
        max_rotate: Largest rotation in degrees, in each direction, of `affine`.
        max_scale: Largest relative change of size of `affine`: 0.1 is from 0.9 to 1.1.
        pipeline: `batched`: converts a batch of images at once; `per_sample`: converts image by image with PIL and
            torchvision, as most scripts do. It is slower, and equal up to rounding.
        workers: Worker processes of each rank that load ahead, with `per_sample` and for segmentation images, which are
            always loaded one by one. 0: the rank loads the samples itself.
    """

    name: Literal["mnist", "fashion_mnist", "kmnist", "qmnist", "emnist", "voc2012", "shapes"] = "mnist"
    root: str | None = None
    download: bool = False
    emnist_split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    batch_size: int = 64
    batch_per: Literal["global", "rank"] = "global"
    eval_batch_size: int | None = None
    val_size: int = 5000
    train_size: int | None = None
    test_size: int | None = None
    image_size: int = 256
    border: Literal["ignore", "class"] = "ignore"
    augment: Literal["none", "shift", "affine", "crop"] = "none"
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
        check_bounds("data", self, "image_size", low=16, high=4096)
        require(0 <= self.max_scale < 1, f"data.max_scale must be at least 0 and below 1, but is {self.max_scale}.")
        require(
            self.workers == 0 or not self.batched,
            f"data.workers {self.workers} needs data.pipeline per_sample: the batched pipeline has no workers.",
        )

    @property
    def task(self) -> Task:
        """The task of the data set."""
        return task_of(self.name)

    @property
    def batched(self) -> bool:
        """Whether batches are taken from images in memory, not loaded sample by sample."""
        return self.pipeline == "batched" and not self.task.pixelwise

    @property
    def evaluation_batch(self) -> int:
        """Samples that a rank evaluates at once."""
        return self.eval_batch_size or self.task.eval_batch_size

    @property
    def prediction_batch(self) -> int:
        """Samples that a rank predicts at once."""
        # A mask rounds differently in a batch with others. Alone, it is the same on any number of ranks.
        return 1 if self.task.pixelwise else self.evaluation_batch
