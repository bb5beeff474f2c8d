"""A batch sampler for any DataLoader, whose batches do not depend on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Sampler

from lit_mnist.errors import InputError
from lit_mnist.order import epoch_order, evaluation_rows, train_rows


class ExactDistributedSampler(Sampler[list[int]]):
    """Decides which samples each rank uses: the same global batches on any number of ranks.

    In training, the order of an epoch is a function of (seed, epoch). It is cut into global batches, and each one is
    split evenly over the ranks. An incomplete last batch is dropped, which is logged once. In evaluation, each sample
    is used exactly once, in contiguous parts, without padding, and all ranks have the same number of batches, so that
    collectives in a step do not hang (with batches of one sample, a rank may have one less):

        train = DataLoader(dataset, batch_sampler=ExactDistributedSampler(dataset, batch_size=64, seed=1))
        val = DataLoader(val_dataset, batch_sampler=ExactDistributedSampler(val_dataset, 256, evaluation=True))
        trainer = Trainer(use_distributed_sampler=False)
        trainer.fit(module, train, val)

    It can seek: `load_state_dict` lets the next iteration begin within an epoch, without reading what was before.

    Args:
        dataset: The data set. Its method `set_epoch`, if it has one, is called with each epoch.
        batch_size: Samples of a batch over all ranks. In training, it must be a multiple of the number of ranks. In
            evaluation, it counts the samples of one rank, as it does not affect the result.
        seed: Seed of the order.
        rank: The rank; by default that of `torch.distributed` when the loader is used, otherwise 0.
        world_size: Number of ranks; given with `rank`.
        evaluation: Whether each sample is used exactly once, in the order of the data set.

    Attributes:
        epoch: The epoch, which a Trainer sets by `set_epoch`.
        start: The batch with which the next iteration begins.

    Raises:
        InputError: The samples do not fill one batch, a training batch cannot be split evenly over the ranks, or an
            evaluation has fewer samples than ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        seed: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        evaluation: bool = False,
    ) -> None:
        self.dataset, self.batch_size, self.seed, self.evaluation = dataset, batch_size, seed, evaluation
        self._place = None if rank is None or world_size is None else (rank, world_size)
        self.epoch = self.start = 0
        self._check()
        if not evaluation and self.rank == 0 and (dropped := len(dataset) % batch_size):
            rank_zero_info(f"{dropped} samples of each epoch are dropped: they do not fill a batch of {batch_size}.")

    def _check(self) -> None:
        count, size, ranks = len(self.dataset), self.batch_size, self.world_size
        if self.evaluation:
            if 0 < count < ranks:
                raise InputError(f"{count} samples cannot be evaluated on {ranks} ranks: use fewer ranks.")
        elif size < 1 or count < size:
            raise InputError(f"{count} samples do not fill one batch of {size}.")
        elif size % ranks:
            raise InputError(f"A batch of {size} samples cannot be split evenly over {ranks} ranks.")

    @property
    def rank(self) -> int:
        """The rank; a loader may be made before the ranks join their group."""
        return self._place[0] if self._place else dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._place[1] if self._place else dist.get_world_size() if dist.is_initialized() else 1

    @property
    def sampler(self) -> ExactDistributedSampler:
        """This object: Lightning calls `set_epoch` of the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, here and in the data set."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Returns the number of batches, equal on all ranks."""
        if not self.evaluation:
            return len(self.dataset) // self.batch_size
        return math.ceil(math.ceil(len(self.dataset) / self.world_size) / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the indices of this rank's samples, batch by batch."""
        self._check()
        count = len(self.dataset)
        if self.evaluation:
            rows = range(count)[evaluation_rows(count, self.rank, self.world_size)]
            parts = (rows[evaluation_rows(len(rows), number, len(self))] for number in range(len(self)))
            yield from (list(part) for part in parts if part)
            return
        first, self.start = self.start, 0
        order = epoch_order(self.seed, self.epoch, count)
        for batch in range(first, len(self)):
            yield order[train_rows(batch, self.batch_size, self.rank, self.world_size)].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the batch with which the next iteration begins."""
        return {"epoch": self.epoch, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration begin with a batch of an epoch; the number of ranks may differ."""
        self.set_epoch(state["epoch"])
        self.start = state["start"]
