"""Probes of the DataLoaders: short epochs, and which samples each of them has."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ddp_doctor.probes.draws import DrawProbe, seed_own
from ddp_doctor.probes.generators import OwnGenerators, seed_generators
from ddp_doctor.probes.micro_batches import MicroBatchProbe
from ddp_doctor.probes.rank_batches import RankBatches
from ddp_doctor.probes.samples import SampleProbe
from ddp_doctor.probes.short_epoch import ShortEpoch
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import watch_workers, without_modes

# A program that has more epochs than are wanted is ended after so many of them, or so many seconds.
_MOST_EPOCHS, _MOST_SECONDS = 10, 20.0
_LAST_EPOCH = "last_epoch"


class LoaderProbe:
    """Observes the DataLoaders.

    Args:
        recorder: Takes the events.
        spec: The run.
        feed: The batches of another run, or None.
        finish: Called when everything that is wanted was seen; it does not return.
        first_batch: Called with each training batch, before it is given to the user's code.
        micro: Records the micro-batches, or gives those of the ranks; None in other runs.
        is_alone: Whether the others wait for what this rank trains alone, so that the run must not end.
    """

    def __init__(
        self,
        recorder: Recorder,
        spec: Spec,
        feed: RankBatches | None,
        finish: Callable[[], None],
        first_batch: Callable[[], None],
        micro: MicroBatchProbe | None = None,
        is_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.recorder, self.spec, self.feed, self.finish, self.first_batch = recorder, spec, feed, finish, first_batch
        self.micro, self.is_alone = micro, is_alone
        self.samples = SampleProbe(recorder, spec)
        self.own = OwnGenerators()
        self.draws = DrawProbe(recorder, spec, feed, self.own)
        self.iterations: dict[int, int] = {}
        # The generator function of the user that has begun each loader.
        self.generators: dict[int, FrameType | None] = {}
        # Optimizer steps after each batch of the first epoch; 0 if they vary or the program fetches batches ahead.
        self.steps_per_batch: int | None = None
        self.training_epochs = 0
        self.shortened = self.ending = False
        self.open: list[ShortEpoch] = []
        self._loaders: list[Any] = []
        self._since = 0.0

    @property
    def trains(self) -> bool:
        """Whether the training takes its batches from a loader."""
        return self.training_epochs > 0 or any(epoch.event["gradients"] for epoch in self.open)

    def install(self) -> None:
        """Installs the probe."""
        watch_workers()
        wrap(DataLoader, "__iter__", self._on_iter)
        before(
            DistributedSampler, "set_epoch", lambda sampler, epoch: self.recorder.add("set_epoch", number=int(epoch))
        )

    def _on_iter(self, original: Callable[..., Any], loader: Any) -> Iterator[Any]:
        number = self.number(loader)
        for epoch in [epoch for epoch in self.open if epoch.loader == number]:
            epoch.end()
        if self.ending:
            self.finish()
        self.seed(loader, loader.sampler, loader.batch_sampler, loader.dataset)
        self.samples.prepare(loader, number, self.iterations.get(number, 0), self.training_epochs)
        # The seed of the workers is drawn here, which is no draw of the step.
        with without_modes():
            iterator = original(loader)
        return ShortEpoch(self, loader, iterator)

    def forget(self) -> None:
        """Forgets the loaders so far."""
        self.draws.leave()
        self.open.clear()
        self._loaders.clear()
        self.iterations.clear()
        self.generators.clear()
        self.samples.datasets.found.clear()
        self.training_epochs = 0

    def seed(self, *owners: Any) -> None:
        """Seeds the generators, and those of the owners, by the epoch, so that a resumed run has the same draws."""
        if self.spec.purpose in {"save", "resume", "whole"} and torch.is_grad_enabled():
            seed = self.spec.seed + self.training_epochs + (self.spec.purpose == "resume")
            seed_generators(seed)
            for owner in owners:
                seed_own(owner, seed)

    def number(self, loader: Any) -> int:
        """Returns the number of a loader, in the order of first use."""
        for number, other in enumerate(self._loaders):
            if other is loader:
                return number
        self._loaders.append(loader)
        return len(self._loaders) - 1

    def end_later(self, batch: dict[str, Any]) -> None:
        """Ends the run after the next optimizer step, or before the next epoch.

        Args:
            batch: The loader, iteration and number under which the draws until then are recorded.
        """
        self.ending = True
        self.draws.leave()
        self.draws.enter(batch, None)

    def is_last(self, *, trains: bool) -> bool:
        """Returns whether the run ends with this epoch.

        The first rank that has been late for long enough decides it for the epoch after its own, which no other rank
        has ended.

        Args:
            trains: Whether it is an epoch of training.
        """
        late = self.training_epochs - self.spec.epochs
        if late > _MOST_EPOCHS:
            return True
        if late < 0 or not trains or self.spec.purpose != "train":
            return False
        self._since = self._since or time.monotonic()
        path = self.recorder.folder / _LAST_EPOCH
        if time.monotonic() > self._since + _MOST_SECONDS:
            with suppress(FileExistsError), path.open("x") as file:
                file.write(str(self.training_epochs + 1))
        text = path.read_text() if path.exists() else ""
        return self.training_epochs >= int(text or sys.maxsize)

    def close(self) -> None:
        """Ends the epochs that nobody has ended, as a limit of a Trainer leaves them."""
        self.draws.leave()
        for epoch in list(self.open):
            epoch.end()
