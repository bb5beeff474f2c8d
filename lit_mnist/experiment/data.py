"""The section `data`: the data set, its split, and how batches are cut from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require
from lit_mnist.experiment.task import Task, task_of


@dataclass(frozen=True)
class DataSettings:
    """The data set, its split, and how batches are cut from it.

    Args:
        name: Digits: `mnist` (embedded in the package), or `fashion_mnist`, `kmnist`, `qmnist`, `emnist` (downloaded
            once). Segmentation images, in which each pixel has a class: `voc2012` (Pascal VOC), or `shapes` (generated
            once).
        root: Folder of the data files. By default, MNIST comes from the package, the others from the user's cache.
        download: Whether to download `voc2012`, once, if its files are missing.
        emnist_split: The split of EMNIST, if `name` is `emnist`.
        batch_size: Samples of one micro-batch over all ranks (or of one rank: see `batch_per`).
        batch_per: `global`: `batch_size` counts all ranks' samples; `rank`: it is multiplied by the number of ranks.
        eval_batch_size: Samples that a rank evaluates at once, which changes no result; unset: 1000 digits, or 16
            segmentation images.
        val_size: Samples of the training set that are used for validation; 0 for none.
        train_size: Train on only this many samples, the first after the validation split.
        test_size: Test on only this many samples, the first.
        image_size: Height and width in pixels to which segmentation images are resized.
        border: Meaning of the pixels of value 255, by which `voc2012` and `shapes` mark the border of an object:
            `ignore`: they count in no loss and no metric; `class`: they are one more class.
        augment: For digits `none`, `shift` (whole pixels) or `affine` (rotation, scale and sub-pixel shift); for
            segmentation images `none` or `crop` (random scale, position and flip).
        max_shift: Largest shift in pixels, each way, of `shift` and `affine`.
        max_rotate: Largest rotation in degrees, each way, of `affine`.
        max_scale: Largest relative change of size of `affine`: 0.1 is from 0.9 to 1.1.
        pipeline: `batched`: a batch of images is converted in one step; `per_sample`: each image is converted by
            itself, by PIL and torchvision, as in most scripts: slower, and equal up to rounding.
        workers: Worker processes of each rank that load ahead, with `per_sample` and for segmentation images, which are
            always read one by one; 0: the rank itself loads the samples.
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
        for name in ("batch_size", "eval_batch_size", "train_size", "test_size"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"data.{name} must be at least 1, but is {value}.")
        require(self.val_size >= 0, f"data.val_size must be at least 0, but is {self.val_size}.")
        require(0 <= self.max_shift <= 14, f"data.max_shift must be from 0 to 14 pixels, but is {self.max_shift}.")
        require(0 <= self.max_rotate <= 180, f"data.max_rotate must be from 0 to 180, but is {self.max_rotate}.")
        require(0 <= self.max_scale < 1, f"data.max_scale must be at least 0 and below 1, but is {self.max_scale}.")
        require(0 <= self.workers <= 64, f"data.workers must be from 0 to 64, but is {self.workers}.")
        require(16 <= self.image_size <= 4096, f"data.image_size must be from 16 to 4096, but is {self.image_size}.")
        require(
            self.workers == 0 or not self.batched,
            f"data.workers {self.workers} needs data.pipeline per_sample: whole batches are cut without workers.",
        )

    @property
    def task(self) -> Task:
        """The task of the data set."""
        return task_of(self.name)

    @property
    def batched(self) -> bool:
        """Whether whole batches are cut from images in memory, instead of loading sample by sample."""
        return self.pipeline == "batched" and not self.task.pixelwise

    @property
    def evaluation_batch(self) -> int:
        """Samples that a rank evaluates at once."""
        return self.eval_batch_size or self.task.eval_batch_size

    @property
    def prediction_batch(self) -> int:
        """Samples that a rank predicts at once.

        The mask of an image rounds differently in a batch with others. Alone, it is the same on any number of ranks.
        """
        return 1 if self.task.pixelwise else self.evaluation_batch
