"""The LightningDataModule: MNIST in batches that are a function of the seed and the step alone."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from lit_mnist.errors import InputError
from lit_mnist.mnist import Augmentation, Data, Digits, Name, Split, load, whole_batch
from lit_mnist.order import validation_split
from lit_mnist.plugins.sampler import ExactDistributedSampler


class MNISTDataModule(LightningDataModule):
    """Batches of MNIST, or of a set like it: images, float32 [batch, 1, 28, 28], and classes, int64 [batch].

    Args:
        name: The data set: `mnist` (in the package), or `fashion_mnist`, `kmnist` or `qmnist` (downloaded once).
        root: Folder of the files; by default those of the package, or `~/.cache/lit_mnist` for the other sets.
        batch_size: Samples of a batch over all ranks.
        eval_batch_size: Samples that a rank evaluates at once; it does not affect the result.
        val_size: Samples of the training set to validate on; 0 for none.
        augment: `none`, `shift` (whole pixels) or `affine` (rotation, scale and sub-pixel shift), in training.
        num_workers: Worker processes of each rank.
        seed: Seed of the split, the order and the augmentation; by default that of `seed_everything`.
    """

    def __init__(
        self,
        name: Name = "mnist",
        root: str | None = None,
        batch_size: int = 64,
        eval_batch_size: int = 1000,
        val_size: int = 5000,
        augment: Augmentation = "none",
        num_workers: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # a Trainer rejects two logged seeds that differ
        self.seed = torch.initial_seed() if seed is None else seed
        self.data: Data | None = None
        self.epoch = self.batches_read = 0

    def prepare_data(self) -> None:
        """Downloads a set that is not in the package; one process of each machine does this."""
        if self.hparams.name != "mnist":
            load(self.hparams.name, self.hparams.root, download=True)

    def setup(self, stage: str) -> None:
        """Loads, verifies and splits the data."""
        self.epoch = self.batches_read = 0
        if self.data is not None:
            return
        self.data = load(self.hparams.name, self.hparams.root)
        images, labels = self.data.train.images, self.data.train.labels
        if not 0 <= self.hparams.val_size < len(labels):
            raise InputError(f"data.val_size must be from 0 to {len(labels) - 1}, but is {self.hparams.val_size}.")
        train, val = map(torch.from_numpy, validation_split(self.seed, len(labels), self.hparams.val_size))
        self.train, self.val = Split(images[train], labels[train]), Split(images[val], labels[val])

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns the training batches of this rank; a resumed epoch continues."""
        digits = Digits(self.train, self.hparams.augment, self.seed)
        rank, world_size = self._rank()
        sampler = ExactDistributedSampler(digits, self.hparams.batch_size, self.seed, rank=rank, world_size=world_size)
        sampler.load_state_dict({"epoch": self.epoch, "start": self.batches_read})
        return self._loader(digits, sampler)

    def val_dataloader(self) -> Any:
        """Returns the validation batches of this rank, or none."""
        return self._evaluation(self.val) if len(self.val) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """Returns the test batches of this rank."""
        assert self.data
        return self._evaluation(self.data.test)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Returns the batches of the test split to predict on this rank."""
        return self.test_dataloader()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Counts the training batches that were used; workers read further ahead."""
        if self.trainer and self.trainer.training:
            self.batches_read += 1
        return batch

    # Lightning restores the state of a data module before it asks for a dataloader. A loader's own state comes too late
    # where configure_optimizers asks for the number of steps: github.com/Lightning-AI/pytorch-lightning/issues/20550.
    # Workers begin to read before a Trainer sets the epoch.
    def state_dict(self) -> dict[str, int]:
        """Returns the epoch and the number of batches that were used in it."""
        assert self.trainer
        epochs, batches = divmod(self.batches_read, int(self.trainer.num_training_batches or 1))
        return {"epoch": self.epoch + epochs, "batches_read": batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores them."""
        self.epoch, self.batches_read = state["epoch"], state["batches_read"]

    def _evaluation(self, split: Split) -> DataLoader[Any]:
        rank, world_size = self._rank()
        sampler = ExactDistributedSampler(
            split, self.hparams.eval_batch_size, rank=rank, world_size=world_size, evaluation=True
        )
        return self._loader(Digits(split), sampler)

    def _loader(self, digits: Digits, sampler: ExactDistributedSampler) -> DataLoader[Any]:
        return DataLoader(
            digits,
            batch_sampler=sampler,
            collate_fn=whole_batch,
            num_workers=self.hparams.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def _rank(self) -> tuple[int | None, int | None]:
        """Returns rank and world size; without a Trainer, the sampler asks torch.distributed."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (None, None)
