"""Batches cut from pictures in memory: index, convert, augment, normalise, each in one vectorised step per batch.

All of it happens on the rank's device, where the pictures stay. What the host knows of an epoch, which samples and
which random numbers, it works out and sends there once, at the epoch's first batch.

Where the experiment asks for the classic way, sample by sample, `per_sample.py` makes the pictures instead; so it does
with scenes, whose files are read one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lit_mnist.data.augmentation import augment, changed, changes
from lit_mnist.data.dataset import AnySplit, Split, class_names
from lit_mnist.data.device import CPU, Batch, moved, resident
from lit_mnist.data.order import Indices, evaluation_rows, rank_rows, train_indices
from lit_mnist.data.randomness import Draw
from lit_mnist.data.scenes import Scenes, SceneSamples, normalised
from lit_mnist.experiment import DataSettings
from lit_mnist.plan import Plan

if TYPE_CHECKING:
    from lit_mnist.data.per_sample import Augment
    from lit_mnist.data.scenes import Change

__all__ = ["PIXEL_MEAN", "PIXEL_STD", "Batch", "EvaluationBatches", "TrainBatches", "normalise"]

# Mean and standard deviation of MNIST's training pixels as shares of 255; the whole family is brought to this scale.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081

# Pictures that a GPU cuts at once: a few kernels for many batches. A CPU cuts each batch when it is needed, since it
# then still lies in the cache.
_CUT_AT_ONCE = 4096


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Brings float pixels of 0 to 255 to mean 0 and standard deviation 1 over MNIST, in place."""
    return images.mul_(1 / (255 * PIXEL_STD)).sub_(PIXEL_MEAN / PIXEL_STD)


class _Epoch(NamedTuple):
    """What one rank's micro-batches of an epoch are made of.

    Attributes:
        indices: The samples' numbers, int64 [micro-batches, samples], on the host.
        rows: The same on the device.
        changes: What `augmentation.changes` gives for them, [numbers, micro-batches, samples], on the device.
    """

    indices: torch.Tensor
    rows: torch.Tensor
    changes: torch.Tensor


class TrainBatches:
    """The micro-batches of one epoch, as one rank sees them.

    Its length is the whole epoch's, also where the epoch is taken up in the middle: a micro-batch keeps its number.

    Args:
        split: The training samples.
        plan: Size and number of the micro-batches.
        settings: Kind and strength of the augmentation, and which way the pictures are made.
        seed: The experiment's seed.
        epoch: The epoch, from 0.
        rank: This rank.
        first: The first micro-batch to give, from 0: where an epoch is taken up in the middle.
        dtype: Floating-point type of the pictures.
        device: Where whole batches are made; what is made sample by sample is on the host.
    """

    def __init__(
        self,
        split: AnySplit,
        *,
        plan: Plan,
        settings: DataSettings,
        seed: int,
        epoch: int,
        rank: int,
        first: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        self.split = split
        self.plan = plan
        self.settings = settings
        self.seed = seed
        self.epoch = epoch
        self.rows = rank_rows(plan.batch_size, rank, plan.world_size)
        self.samples = self.rows.stop - self.rows.start
        self.first = first
        self.dtype = dtype
        self.device = device

    def __len__(self) -> int:
        return self.plan.batches_in_epoch(self.epoch)

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.split, Split) and self.settings.pipeline == "batched":
            at_once = 1 if self.device == CPU else max(1, _CUT_AT_ONCE // self.samples)
            for start in range(self.first, len(self), at_once):
                yield from self.cut(range(start, min(start + at_once, len(self))))
            return
        batches = range(self.first, len(self))
        chosen = [self._indices(batch) for batch in batches]
        if isinstance(self.split, Scenes):
            made = _scenes(self.split, chosen, self.settings, self.dtype, self._scene_change())
        else:
            change = partial(augment, settings=self.settings, seed=self.seed, epoch=self.epoch)
            made = _one_by_one(self.split, chosen, self.settings.workers, self.dtype, change)
        for batch, indices, (images, targets) in zip(batches, chosen, made, strict=True):
            yield self._batch(batch, torch.from_numpy(indices.copy()), images, targets)

    def cut(self, batches: range) -> list[Batch]:
        """Returns some micro-batches of the epoch, made in whole batches; not of scenes."""
        assert isinstance(self.split, Split)
        split, epoch = resident(self.split, self.device), self._epoch
        taken = slice(batches.start - self.first, batches.stop - self.first)
        rows, numbers = epoch.rows[taken].flatten(), epoch.changes[:, taken].flatten(1)
        # Not `split.images[rows]`, which takes a CPU four times as long: it copies pixel by pixel.
        images = split.images.index_select(0, rows).unsqueeze(1).to(self.dtype)
        images = normalise(changed(images, numbers, self.settings))
        made = zip(
            batches,
            epoch.indices[taken],
            images.split(self.samples),
            split.labels.index_select(0, rows).split(self.samples),
            strict=True,
        )
        return [self._batch(*batch) for batch in made]

    @cached_property
    def _epoch(self) -> _Epoch:
        indices = np.stack([self._indices(batch) for batch in range(self.first, len(self))])
        numbers = changes(indices.reshape(-1), settings=self.settings, seed=self.seed, epoch=self.epoch)
        host = torch.from_numpy(indices)
        return _Epoch(host, moved(host, self.device), moved(numbers.view(len(numbers), *indices.shape), self.device))

    @cached_property
    def _own_rows(self) -> torch.Tensor:
        return moved(torch.arange(self.rows.start, self.rows.stop), self.device)

    def _scene_change(self) -> Change | None:
        if self.settings.augment == "none":
            return None
        from lit_mnist.data.scene_augmentation import random_crop

        return partial(random_crop, size=self.settings.image_size, seed=self.seed, epoch=self.epoch)

    def _indices(self, batch: int) -> Indices:
        size = self.plan.batch_size
        return train_indices(self.seed, self.epoch, batch, count=len(self.split), batch_size=size)[self.rows]

    def _batch(self, batch: int, indices: torch.Tensor, images: torch.Tensor, targets: torch.Tensor) -> Batch:
        draw = Draw(
            seed=self.seed,
            number=self.epoch * self.plan.batches_per_epoch + batch,
            size=self.plan.batch_size,
            rows=self._own_rows,
        )
        return Batch(images, targets, indices, draw)


class EvaluationBatches:
    """The batches that one rank evaluates: over all ranks, each sample exactly once, in order.

    Args:
        split: The samples.
        rank: This rank.
        world_size: Number of ranks.
        batch_size: Samples of a batch; the last may be smaller.
        settings: Which way the pictures are made; by default in whole batches.
        dtype: Floating-point type of the pictures.
        device: Where whole batches are made; what is made sample by sample is on the host.
    """

    def __init__(
        self,
        split: AnySplit,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        settings: DataSettings | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        self.split = split
        self.rows = evaluation_rows(len(split), rank, world_size)
        self.batch_size = batch_size
        self.settings = settings or DataSettings()
        self.dtype = dtype
        self.device = device

    def __len__(self) -> int:
        return math.ceil((self.rows.stop - self.rows.start) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        starts = range(self.rows.start, self.rows.stop, self.batch_size)
        parts = [slice(start, min(start + self.batch_size, self.rows.stop)) for start in starts]
        chosen = [np.arange(part.start, part.stop) for part in parts]
        if isinstance(self.split, Scenes):
            made = _scenes(self.split, chosen, self.settings, self.dtype)
        elif self.settings.pipeline == "batched":
            yield from map(self._cut, parts)
            return
        else:
            made = _one_by_one(self.split, chosen, self.settings.workers, self.dtype)
        for indices, (images, targets) in zip(chosen, made, strict=True):
            yield Batch(images, targets, torch.from_numpy(indices), None)

    def _cut(self, part: slice) -> Batch:
        assert isinstance(self.split, Split)
        split = resident(self.split, self.device)
        # What lies together in memory needs no index operation, which takes three times as long.
        images = normalise(split.images[part].unsqueeze(1).to(self.dtype))
        return Batch(images, split.labels[part], torch.arange(part.start, part.stop), None)


def _one_by_one(
    split: Split, chosen: Sequence[Indices], workers: int, dtype: torch.dtype, change: Augment | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the pictures and classes of each batch, made sample by sample."""
    # It imports torchvision, which takes more than a second: only who asks for this way waits for it.
    from lit_mnist.data.per_sample import Samples, load_batches

    samples = Samples(split, mean=PIXEL_MEAN, std=PIXEL_STD, dtype=dtype, augment=change)
    return load_batches(samples, chosen, workers)


def _scenes(
    split: Scenes,
    chosen: Sequence[Indices],
    settings: DataSettings,
    dtype: torch.dtype,
    change: Change | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the pictures and targets of each batch, read from files."""
    from lit_mnist.data.per_sample import load_batches

    samples = SceneSamples(
        split,
        size=settings.image_size,
        num_classes=len(class_names(settings.name, border=settings.border)),
        border_is_class=settings.border == "class",
        change=change,
    )
    for pictures, targets in load_batches(samples, chosen, settings.workers):
        yield normalised(pictures, dtype), targets.long()
