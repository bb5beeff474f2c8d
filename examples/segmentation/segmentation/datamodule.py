"""The LightningDataModule: verified files, and batches that do not depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lit_mnist.errors import InputError
from lit_mnist.plugins.random_numbers import permutation
from segmentation import shapes, voc
from segmentation.dataset import EpochSampler, SegmentationDataset, Split, collate
from segmentation.images import read_user_image
from segmentation.verification import verify

_CLASSES = {"shapes": shapes.CLASSES, "voc2012": voc.CLASSES}


class SegmentationData(LightningDataModule):
    """Images and the class of each of their pixels.

    Args:
        name: `shapes` (generated once) or `voc2012` (Pascal VOC, or your own images in its folders).
        root: The folder of the data.
        download: Whether to download `voc2012` (2 GB) if it is missing.
        batch_size: Training images of a batch over all ranks, or of each rank; see `batch_per`.
        batch_per: What `batch_size` counts: `global`, the images of all ranks, or `rank`, those of each rank.
        eval_batch_size: Images that a rank evaluates at once.
        val_size: Images of the training set to validate on; 0 for none.
        train_size: Train on the first images only, after the validation split is taken.
        test_size: Test on the first images only.
        image_size: Height and width in pixels to which images are resized.
        border: Whether the pixels of value 255, the border of objects, are ignored or are one more class.
        augment: `none`, or `crop`: random scale, position and flip.
        workers: Loader workers of each rank.
        images: Files and folders of your own images, for predictions; by default, the test split is predicted.
        seed: Seed of the validation split, the order and the crops.
    """

    def __init__(
        self,
        name: Literal["shapes", "voc2012"] = "shapes",
        root: str = "data",
        download: bool = False,
        batch_size: int = 16,
        batch_per: Literal["global", "rank"] = "global",
        eval_batch_size: int = 16,
        val_size: int = 200,
        train_size: int | None = None,
        test_size: int | None = None,
        image_size: int = 256,
        border: Literal["ignore", "class"] = "ignore",
        augment: Literal["none", "crop"] = "none",
        workers: int = 0,
        images: list[str] | None = None,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.class_names = (*_CLASSES[name], *(("border",) if border == "class" else ()))

    def prepare_data(self) -> None:
        """Generates or downloads missing data, and verifies every file. One rank of each machine calls it.

        Raises:
            InputError: The data are missing, or a file is damaged.
        """
        given, root = self.hparams, Path(self.hparams["root"]).expanduser()
        if self._predicts_user_images:
            for path in self._user_images():
                read_user_image(path)
            return
        if given["name"] == "shapes":
            folder = shapes.generate_shapes(root)
            try:
                digest = verify(folder, voc.read_splits(folder), len(shapes.CLASSES))
            except InputError as error:
                raise InputError(f"{error}. {shapes.ADVICE.format(folder)}") from error
            shapes.check_generated(folder, digest)
            return
        if given["download"]:
            voc.download_voc2012(root)
        folder = voc.find_voc2012(root)
        verify(folder, voc.read_splits(folder), len(voc.CLASSES))

    def setup(self, stage: str) -> None:
        """Reads the lists of the files, and splits them.

        Raises:
            InputError: No image is left for training.
        """
        given, root = self.hparams, Path(self.hparams["root"]).expanduser()
        if self._predicts_user_images:
            self.predict = self._dataset(Split(tuple(self._user_images())))
            return
        folder = root / shapes.NAME if given["name"] == "shapes" else voc.find_voc2012(root)
        train, test = voc.read_splits(folder).values()
        if given["val_size"] >= len(train):
            raise InputError(f"data.val_size {given['val_size']} leaves none of {len(train)} images for training.")
        order = permutation(given["seed"], "validation split", len(train))
        chosen, validated = np.sort(order[given["val_size"] :]), np.sort(order[: given["val_size"]])
        crop_seed = given["seed"] if given["augment"] == "crop" else None
        self.train = self._dataset(train.take(chosen[: given["train_size"]]), crop_seed)
        self.val = self._dataset(train.take(validated))
        self.test = self.predict = self._dataset(test.take(range(len(test))[: given["test_size"]]))

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the loader of this rank's share of the global batches, whose order is a function of (seed, epoch)."""
        ranks = self.trainer.world_size if self.trainer else 1
        size = self.hparams["batch_size"] * (ranks if self.hparams["batch_per"] == "rank" else 1)
        sampler = EpochSampler(self.train, size, seed=self.hparams["seed"])
        return self._loader(self.train, batch_sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Returns a plain loader, whose images LitTrainer splits without padding, or no loader."""
        return self._loader(self.val, batch_size=self.hparams["eval_batch_size"]) if len(self.val) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """Returns a plain loader, as for validation."""
        return self._loader(self.test, batch_size=self.hparams["eval_batch_size"])

    def predict_dataloader(self) -> DataLoader[Any]:
        """Returns a loader of single images: in a batch with others, a mask would be rounded differently."""
        return self._loader(self.predict, batch_size=1)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Raises the error of a file that cannot be read; see `collate`."""
        if isinstance(batch, InputError):
            raise batch
        return batch

    @property
    def _predicts_user_images(self) -> bool:
        predicts = self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING
        return predicts and self.hparams["images"] is not None

    def _user_images(self) -> list[Path]:
        """Returns the files, with those in the folders.

        Raises:
            InputError: There are none.
        """
        found: list[Path] = []
        for path in map(Path, self.hparams["images"]):
            found += sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        if not found:
            raise InputError(f"data.images {', '.join(self.hparams['images'])}: there are no files.")
        return found

    def _dataset(self, split: Split, crop_seed: int | None = None) -> SegmentationDataset:
        border_is_class, classes = self.hparams["border"] == "class", len(_CLASSES[self.hparams["name"]])
        size = self.hparams["image_size"]
        return SegmentationDataset(split, classes, size, border_is_class=border_is_class, crop_seed=crop_seed)

    def _loader(self, dataset: SegmentationDataset, **options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, num_workers=self.hparams["workers"], collate_fn=collate, **options)
