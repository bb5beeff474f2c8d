"""A batch sampler for any DataLoader, whose batches do not depend on the number of ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import BatchSampler, Sampler

from lit_mnist.distributed.sample_order import rank_rows, train_indices
from lit_mnist.errors import InputError, require

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class ExactDistributedSampler(Sampler[list[int]]):
    """Decides which samples each rank uses: the same global batches on any number of ranks.

    In training, the order of an epoch is a function of (seed, epoch). It is cut into global batches, and each one is
    split evenly over the ranks. An incomplete last batch is dropped, which is logged once. In evaluation, each sample
    is used exactly once, in contiguous parts, without padding:

        train = DataLoader(dataset, batch_sampler=ExactDistributedSampler(dataset, batch_size=64, seed=1))
        val = DataLoader(val_dataset, batch_sampler=ExactDistributedSampler(val_dataset, 256, evaluation=True))
        trainer = Trainer(use_distributed_sampler=False)
        trainer.fit(module, train, val)

    Args:
        dataset: The data set, or its number of samples.
        batch_size: Samples of a batch over all ranks. In training, it must be a multiple of the number of ranks.
        seed: Seed of the order.
        rank: The rank; by default that of `torch.distributed`, once it is initialized.
        world_size: Number of ranks; set if and only if `rank` is.
        evaluation: Whether each sample is used exactly once, in the order of the data set.

    Attributes:
        epoch: The epoch. A Trainer sets it by `set_epoch`.

    Raises:
        InputError: An argument is invalid.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        seed: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        evaluation: bool = False,
    ) -> None:
        require(isinstance(dataset, int | Sized), f"{type(dataset).__name__} has no length: use a map-style data set.")
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        require(batch_size > 0, f"batch_size must be at least 1, but is {batch_size}.")
        least = 1 if evaluation else batch_size
        require(self.length >= least, f"{self.length} samples do not fill one batch of {least}.")
        require((rank is None) == (world_size is None), "Set both rank and world_size, or neither.")
        require(rank is None or 0 <= rank < (world_size or 0), f"There is no rank {rank} of {world_size}.")
        self.batch_size, self.seed, self.evaluation = batch_size, seed, evaluation
        self.epoch = 0
        self._rank, self._world_size = rank, world_size
        # The batch that the next iteration begins with, and the one after the last that was delivered.
        self._first = self._next = 0
        # The batch that `load_state_dict` restored, until the training sets its epoch, and the epoch that it has set.
        self._restored: int | None = None
        self._epoch_set: int | None = None
        self._logged = False

    @property
    def sampler(self) -> ExactDistributedSampler:
        """This object: Lightning calls `set_epoch` of the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which begins with its first batch unless it is the one that `load_state_dict` restored.

        Raises:
            InputError: Batches of an earlier epoch, which `load_state_dict` restored, were loaded in advance.
        """
        restored, self._restored, self._epoch_set = self._restored, None, epoch
        if epoch == self.epoch:
            return
        if restored is not None and epoch > self.epoch and self._next > restored:
            raise InputError(
                f"The sampler was restored at batch {restored} of epoch {self.epoch}, and the loader's workers have "
                f"loaded batches from there, but the training continues with epoch {epoch}, since epoch {self.epoch} "
                "had ended early, such as by limit_train_batches. Save the position with state_dict(trainer=trainer)."
            )
        self.epoch = epoch
        self._first = self._next = 0

    def __len__(self) -> int:
        """Returns the number of batches, which is equal on all ranks.

        In evaluation, ranks with fewer samples may deliver one batch less: Lightning skips the hooks, and so the
        collectives, of a rank whose loader has no batches.
        """
        _, world_size = self._ranks()
        if not self.evaluation:
            return self.length // self.batch_size
        return math.ceil(math.ceil(self.length / world_size) / self._share(world_size))

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the indices of this rank's samples, batch by batch.

        Raises:
            InputError: The epoch changed within the iteration, the batch cannot be split evenly, or a loader has this
                object as its `sampler`.
        """
        if sys._getframe(1).f_code is BatchSampler.__iter__.__code__:
            # Such a loader takes each batch for one index.
            raise InputError(
                "ExactDistributedSampler yields whole batches: pass it to the DataLoader as batch_sampler, without "
                "batch_size, and not as sampler."
            )
        rank, world_size = self._ranks()
        return self._evaluation(rank, world_size) if self.evaluation else self._training(rank, world_size)

    def _training(self, rank: int, world_size: int) -> Iterator[list[int]]:
        self._log_dropped()
        rows = rank_rows(self.batch_size, rank, world_size)
        # At the first batch, not where the iterator is made: Lightning sets the epoch between the two.
        epoch, first, self._first = self.epoch, self._first, 0
        for batch in range(first, self.length // self.batch_size):
            if self.epoch != epoch:
                raise InputError(
                    f"The epoch was set to {self.epoch} after batches of epoch {epoch} had been loaded. To resume with "
                    "loader workers, call load_state_dict of the sampler before Trainer.fit loads batches, such as in "
                    "LightningDataModule.load_state_dict."
                )
            self._next = batch + 1
            indices = train_indices(self.seed, epoch, batch, count=self.length, batch_size=self.batch_size)
            yield indices[rows].tolist()

    def _evaluation(self, rank: int, world_size: int) -> Iterator[list[int]]:
        # The first ranks have one sample more: rank 0, which writes checkpoints, must see its last batch as the last.
        size, more = divmod(self.length, world_size)
        start = rank * size + min(rank, more)
        stop = start + size + (rank < more)
        share = self._share(world_size)
        for first in range(start, stop, share):
            yield list(range(first, min(first + share, stop)))

    def seek(self, batch: int) -> None:
        """Lets the next iteration begin with this batch of the epoch, counted from 0. ExactCheckpoint calls it."""
        self._first = self._next = batch

    def state_dict(self, batches: int | None = None, *, trainer: Trainer | None = None) -> dict[str, int]:
        """Returns the position, which is a position on any number of ranks.

        Args:
            batches: Number of batches of the epoch that were used. It is needed with loader workers, which load
                batches in advance; by default, all batches that were delivered count as used.
            trainer: A Trainer that fits with this sampler, which knows this number, and whether the epoch has ended
                earlier than the data, such as by `limit_train_batches` or `max_steps`.
        """
        if self.evaluation:
            return {}
        require(batches is None or trainer is None, "Pass the number of batches or the Trainer, not both.")
        per_epoch = self.length // self.batch_size
        epoch, used = self.epoch, self._next if batches is None else batches
        if trainer is not None:
            epoch, used = _position_in_fit(trainer)
        require(0 <= used <= per_epoch, f"An epoch has {per_epoch} batches, but {used} were given as used.")
        epoch, batch = epoch + used // per_epoch, used % per_epoch
        return {**self._identity(), "epoch": epoch, "batch": batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a position: the next iteration begins there.

        Raises:
            InputError: The state is of a sampler with other data, another batch size or another seed.
        """
        if self.evaluation:
            return
        for name, own in self._identity().items():
            require(state.get(name) == own, f"The sampler was saved with {name} {state.get(name)}, but has {own}.")
        self.epoch = state["epoch"]
        self._first = self._next = state["batch"]
        self._restored = None if self._epoch_set == self.epoch else self._first

    def _identity(self) -> dict[str, int]:
        return {"length": self.length, "batch_size": self.batch_size, "seed": self.seed}

    def _ranks(self) -> tuple[int, int]:
        if self._rank is not None and self._world_size is not None:
            rank, world_size = self._rank, self._world_size
        else:
            rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if not self.evaluation and self.batch_size % world_size:
            raise InputError(
                f"A batch of {self.batch_size} cannot be split evenly over {world_size} ranks: set batch_size to a "
                f"multiple of {world_size}."
            )
        return rank, world_size

    def _share(self, world_size: int) -> int:
        return math.ceil(self.batch_size / world_size)

    def _log_dropped(self) -> None:
        if not self._logged and (dropped := self.length % self.batch_size):
            rank_zero_info(f"{dropped} of {self.length} samples are dropped from each epoch: they fill no whole batch.")
        self._logged = True


def _position_in_fit(trainer: Trainer) -> tuple[int, int]:
    """Returns the epoch and the number of its batches that were used; an epoch that has ended counts as ended."""
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    if epochs.started < epochs.ready or epochs.processed >= epochs.ready:  # type: ignore[attr-defined]
        # Between two epochs: the counts of batches are those of the one before.
        return epochs.processed, 0  # type: ignore[attr-defined]
    if batches.is_last_batch:
        return epochs.processed + 1, 0  # type: ignore[attr-defined]
    return epochs.processed, batches.current.processed  # type: ignore[attr-defined]
