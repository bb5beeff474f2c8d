"""The section `data`: the data set, its split, and how batches are cut from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require

DATA_NAMES = ("mnist", "fashion_mnist", "kmnist", "qmnist", "emnist")
SEGMENTATION_NAMES = ("voc2012", "shapes")


@dataclass(frozen=True)
class DataSettings:
    """The data set, its split, and how batches are cut from it.

    Args:
        name: Digits: `mnist` (embedded in the package), or `fashion_mnist`, `kmnist`, `qmnist`, `emnist` (downloaded
            once). SegmentationSplit, of which every pixel has a class: `voc2012` (Pascal VOC), or `shapes` (made once).
        root: Folder of the data files. Without one, MNIST comes from the package, the others from the user's cache.
        download: Whether `voc2012` is downloaded, once, where its files are missing.
        emnist_split: Which of EMNIST's splits, where `name` is `emnist`.
        batch_size: Samples of one micro-batch over all ranks (or of one rank: see `batch_per`).
        batch_per: `global`: `batch_size` counts all ranks' samples; `rank`: it is multiplied by the number of ranks.
        eval_batch_size: Samples that a rank evaluates at once, which changes no result; unset: 1000, of scenes 16.
        val_size: Samples taken off the training set for validation; 0 for none.
        train_size: Train on the first so many samples (after the validation split) only.
        test_size: Test on the first so many samples only.
        image_size: Height and width, in pixels, that scenes are brought to.
        border: What becomes of the pixels that `voc2012` and `shapes` mark as an object's border, by 255: `ignore`:
            they count nowhere; `class`: they are one more class.
        augment: For digits `none`, `shift` (whole pixels) or `affine` (rotation, scale and sub-pixel shift); for scenes
            `none` or `crop` (random scale, place and flip).
        max_shift: Largest shift in pixels, each way, of `shift` and `affine`.
        max_rotate: Largest rotation in degrees, each way, of `affine`.
        max_scale: Largest relative change of size of `affine`: 0.1 is from 0.9 to 1.1.
        pipeline: `batched`: images become a float batch in one step; `per_sample`: each is turned by itself, by PIL
            and torchvision, as the classic scripts do: slower, and equal up to rounding.
        workers: Processes of each rank that load ahead, with `per_sample` and for scenes, which are always read one by
            one; 0: the rank itself turns the samples.
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
            self.workers == 0 or self.pipeline == "per_sample" or self.name in SEGMENTATION_NAMES,
            f"data.workers {self.workers} needs data.pipeline per_sample: whole batches are cut without workers.",
        )

    @property
    def evaluated_at_once(self) -> int:
        """Samples that a rank evaluates at once."""
        return self.eval_batch_size or (16 if self.name in SEGMENTATION_NAMES else 1000)
