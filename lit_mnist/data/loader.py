"""The batches of a rank: images in memory are selected, augmented and normalized in vectorized steps.

These steps run on the device of the rank, where the images stay. The indices and random numbers of an epoch are
computed on the CPU and copied to the device once, at the first batch of the epoch.

With `--data.pipeline per_sample`, the samples are loaded one by one: see `workers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from lit_mnist.data.batch import CPU, Batch, to_device
from lit_mnist.data.dataset import Split
from lit_mnist.data.digits.split import normalize, parameters, transform
from lit_mnist.data.workers import load_batches
from lit_mnist.distributed.rng import RandomKey
from lit_mnist.distributed.sample_order import Indices, evaluation_rows, rank_rows, train_indices
from lit_mnist.experiment import DataSettings
from lit_mnist.experiment.plan import Plan

__all__ = ["Batch", "EpochLoader", "EvaluationBatches", "TrainBatches", "normalize"]

# A GPU prepares this many images at once, with a few kernels for many batches. A CPU prepares each batch when it is
# needed, so that the batch is still in the cache.
_IMAGES_AT_ONCE = 4096


class _Epoch(NamedTuple):
    """The inputs of the micro-batches of one rank in an epoch."""

    indices: torch.Tensor  # of the samples, int64 [micro-batches, samples], on the CPU
    rows: torch.Tensor  # the same on the device
    numbers: torch.Tensor  # the `parameters` of their augmentation, [numbers, micro-batches, samples], on the device


@dataclass(eq=False, repr=False)
class TrainBatches:
    """The micro-batches of one rank in one epoch.

    The length is that of the whole epoch, even with `first`: a micro-batch keeps its index.

    Args:
        split: The training samples.
        plan: Size and number of the micro-batches.
        settings: The augmentation and the pipeline.
        seed: The seed of the experiment.
        epoch: The epoch, from 0.
        rank: This rank.
        first: The first micro-batch to return, from 0, if the epoch is resumed.
        dtype: Floating-point type of the images.
        device: Device of the batches; samples that are loaded one by one stay on the CPU.
    """

    split: Split
    _: KW_ONLY
    plan: Plan
    settings: DataSettings
    seed: int
    epoch: int
    rank: int
    first: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.rows = rank_rows(self.plan.batch_size, self.rank, self.plan.world_size)
        self.samples = self.rows.stop - self.rows.start

    def __len__(self) -> int:
        return self.plan.batches_in_epoch(self.epoch)

    def __iter__(self) -> Iterator[Batch]:
        if self.settings.batched:
            at_once = 1 if self.device == CPU else max(1, _IMAGES_AT_ONCE // self.samples)
            for start in range(self.first, len(self), at_once):
                yield from self._select(range(start, min(start + at_once, len(self))))
            return
        numbers = range(self.first, len(self))
        indices = [self._indices(number) for number in numbers]
        samples = self.split.samples(self.settings, self.dtype, (self.seed, self.epoch))
        loaded = load_batches(samples, indices, self.settings.workers)
        for number, chosen, (images, targets) in zip(numbers, indices, loaded, strict=True):
            yield self._batch(number, torch.from_numpy(chosen.copy()), images, targets)

    def _select(self, batches: range) -> list[Batch]:
        split, epoch = self.split.to(self.device), self._epoch
        part = slice(batches.start - self.first, batches.stop - self.first)
        rows, numbers = epoch.rows[part].flatten(), epoch.numbers[:, part].flatten(1)
        # On a CPU, `split.images[rows]` takes four times as long: it copies pixel by pixel.
        images = split.images.index_select(0, rows).unsqueeze(1).to(self.dtype)
        images = normalize(transform(images, numbers, self.settings))
        targets = split.labels.index_select(0, rows).split(self.samples)
        parts = zip(batches, epoch.indices[part], images.split(self.samples), targets, strict=True)
        return [self._batch(*part) for part in parts]

    @cached_property
    def _epoch(self) -> _Epoch:
        indices = np.stack([self._indices(batch) for batch in range(self.first, len(self))])
        numbers = parameters(indices.reshape(-1), settings=self.settings, seed=self.seed, epoch=self.epoch)
        numbers, host = numbers.view(len(numbers), *indices.shape), torch.from_numpy(indices)
        return _Epoch(host, to_device(host, self.device), to_device(numbers, self.device))

    @cached_property
    def _device_rows(self) -> torch.Tensor:
        return to_device(torch.arange(self.rows.start, self.rows.stop), self.device)

    def _indices(self, batch: int) -> Indices:
        size, order = self.plan.batch_size, self.plan.order_of(self.epoch)
        return train_indices(self.seed, order, batch, count=len(self.split), batch_size=size)[self.rows]

    def _batch(self, batch: int, indices: torch.Tensor, images: torch.Tensor, targets: torch.Tensor) -> Batch:
        number = self.epoch * self.plan.batches_per_epoch + batch
        return Batch(images, targets, indices, RandomKey(self.seed, number, self.plan.batch_size, self._device_rows))


class EpochLoader:
    """The micro-batches of one rank for all epochs of a Trainer, in a different order in each epoch.

    It is not a torch DataLoader, so that a Trainer does not shard it again. A Trainer calls `set_epoch` on the
    `sampler` of a loader, which is this object.

    Args:
        batches: Returns the micro-batches of an epoch, starting with a given one.
        first: Returns the micro-batch at which the Trainer resumes its epoch, 0 at the start of an epoch.
        epoch: The epoch until `set_epoch` is called.
    """

    def __init__(self, batches: Callable[[int, int], TrainBatches], first: Callable[[], int], epoch: int) -> None:
        self.epoch = epoch
        self._batches = batches
        self._first = first
        self._begins = False
        self._sought: int | None = None

    @property
    def sampler(self) -> EpochLoader:
        """Returns this object, whose `set_epoch` a Trainer calls."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch of the next iteration."""
        self.epoch = epoch
        self._begins = True

    def seek(self, batch: int) -> None:
        """Lets the next iteration begin with this micro-batch of the epoch, counted from 0."""
        self._sought = batch

    def __len__(self) -> int:
        return len(self._batches(self.epoch, 0))

    def __iter__(self) -> Iterator[Batch]:
        # Called with the first batch, because a Trainer restores its position after it has created its iterators. A
        # callback that iterates on its own within the epoch gets the whole epoch.
        first = self._first() if self._begins else 0
        if self._sought is not None:
            first = self._sought
        self._begins, self._sought = False, None
        yield from self._batches(self.epoch, first)

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state: the Trainer has the position. The method marks a loader as resumable."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignores the state; see `state_dict`."""


@dataclass(eq=False, repr=False)
class EvaluationBatches:
    """The batches that one rank evaluates: over all ranks, each sample exactly once, in order.

    Args:
        split: The samples.
        rank: This rank.
        world_size: Number of ranks.
        batch_size: Samples of a batch; the last one may be smaller.
        settings: The pipeline; by default, the vectorized one.
        dtype: Floating-point type of the images.
        device: Device of the batches; samples that are loaded one by one stay on the CPU.
    """

    split: Split
    _: KW_ONLY
    rank: int
    world_size: int
    batch_size: int
    settings: DataSettings = field(default_factory=DataSettings)
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    splits_exactly: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.rows = evaluation_rows(len(self.split), self.rank, self.world_size)

    def __len__(self) -> int:
        return math.ceil((self.rows.stop - self.rows.start) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        starts = range(self.rows.start, self.rows.stop, self.batch_size)
        parts = [slice(start, min(start + self.batch_size, self.rows.stop)) for start in starts]
        if self.settings.batched:
            yield from map(self._select, parts)
            return
        indices = [np.arange(part.start, part.stop) for part in parts]
        loaded = load_batches(self.split.samples(self.settings, self.dtype), indices, self.settings.workers)
        for chosen, (images, targets) in zip(indices, loaded, strict=True):
            yield Batch(images, targets, torch.from_numpy(chosen), None)

    def _select(self, part: slice) -> Batch:
        split = self.split.to(self.device)
        # A slice is contiguous: indexing would take three times as long.
        images = normalize(split.images[part].unsqueeze(1).to(self.dtype))
        return Batch(images, split.labels[part], torch.arange(part.start, part.stop), None)
