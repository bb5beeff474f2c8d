"""Probes of the DataLoaders: short epochs, and which samples each of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_doctor.probes.draws import DrawProbe, seed_own
from ddp_doctor.probes.generators import OwnGenerators
from ddp_doctor.probes.micro_batches import MicroBatchProbe
from ddp_doctor.probes.rank_batches import RankBatches
from ddp_doctor.probes.samples import SampleProbe, seed_generators
from ddp_doctor.probes.short_epoch import ShortEpoch
from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import watch_workers, without_modes


class LoaderProbe:
    """Observes the DataLoaders.

    Args:
        recorder: Takes the events.
        spec: The run.
        feed: The batches of another run, or None.
        finish: Called when everything that is wanted was seen; it does not return.
        first_batch: Called with each training batch, before it is given to the user's code.
        micro: Records the micro-batches, or gives those of the ranks; None in other runs.
    """

    def __init__(
        self,
        recorder: Recorder,
        spec: Spec,
        feed: RankBatches | None,
        finish: Callable[[], None],
        first_batch: Callable[[], None],
        micro: MicroBatchProbe | None = None,
    ) -> None:
        self.recorder, self.spec, self.feed, self.finish, self.first_batch = recorder, spec, feed, finish, first_batch
        self.micro = micro
        self.samples = SampleProbe(recorder, spec)
        self.own = OwnGenerators()
        self.draws = DrawProbe(recorder, spec, feed, self.own)
        self.iterations: dict[int, int] = {}
        self.training_epochs = 0
        self.shortened = self.ending = False
        self.open: list[ShortEpoch] = []
        self._loaders: list[Any] = []

    @property
    def trains(self) -> bool:
        """Whether the training takes its batches from a loader."""
        return self.training_epochs > 0 or any(epoch.event["gradients"] for epoch in self.open)

    def install(self) -> None:
        """Installs the probe."""
        watch_workers()
        wrap(DataLoader, "__iter__", self._on_iter)

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

    def close(self) -> None:
        """Ends the epochs that nobody has ended, as a limit of a Trainer leaves them."""
        self.draws.leave()
        for epoch in list(self.open):
            epoch.end()
