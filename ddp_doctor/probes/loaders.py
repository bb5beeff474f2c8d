"""Probes of the DataLoaders: which samples each epoch has, and the random draws of the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_doctor.probes.dropout import DropoutWatch
from ddp_doctor.probes.epochs import ShortEpoch
from ddp_doctor.probes.flows import DrawFlow
from ddp_doctor.probes.generators import States, seed_own, values_drawn
from ddp_doctor.probes.random_replay import RandomReplay
from ddp_doctor.probes.rank_batches import RankBatches
from ddp_doctor.probes.samples import SampleProbe, seed_generators
from ddp_doctor.probes.wrap import wrap
from ddp_doctor.records.recorder import Recorder, digest
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import watch_workers


class LoaderProbe:
    """Observes the DataLoaders.

    Args:
        recorder: Takes the events.
        spec: The run.
        feed: The batches of another run, or None.
        finish: Called when everything that is wanted was seen; it does not return.
        first_batch: Called with each training batch, before it is given to the user's code.
    """

    def __init__(
        self,
        recorder: Recorder,
        spec: Spec,
        feed: RankBatches | None,
        finish: Callable[[], None],
        first_batch: Callable[[], None],
    ) -> None:
        self.recorder, self.spec, self.feed, self.finish, self.first_batch = recorder, spec, feed, finish, first_batch
        self.samples = SampleProbe(recorder, spec)
        self.tape = RandomReplay()
        self.dropout = DropoutWatch(recorder)
        self._watched = False
        self.tape.recording = spec.purpose in {"numbers", "whole", "resume"} and feed is None
        if spec.purpose == "train":
            self.tape.flow = DrawFlow()
        self.iterations: dict[int, int] = {}
        self.training_epochs = 0
        self.open: list[ShortEpoch] = []
        self._loaders: list[Any] = []
        self._newest: dict[str, Any] | None = None
        self._hidden = States()

    def install(self) -> None:
        """Installs the probe."""
        watch_workers()
        wrap(DataLoader, "__iter__", self._on_iter)

    def _on_iter(self, original: Callable[..., Any], loader: Any) -> ShortEpoch:
        number = self.number(loader)
        for epoch in [epoch for epoch in self.open if epoch.loader == number]:
            epoch.end()
        self.seed(loader, loader.sampler, loader.batch_sampler, loader.dataset)
        self.samples.prepare(loader, number, self.iterations.get(number, 0), self.training_epochs)
        return ShortEpoch(self, loader, original(loader))

    def seed(self, *owners: Any) -> None:
        """Seeds the generators by the epoch, so that a resumed training has the same order and draws.

        Args:
            owners: Objects whose own generators are seeded, too.
        """
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

    def enter(self, batch: dict[str, Any], content: Any) -> None:
        """Begins the step after a batch with this content, and sees its random draws."""
        self._newest = batch
        if self.tape.flow:
            self.tape.flow.begin(content)
        self.tape.count = self.tape.most = 0
        if self.feed:
            self.tape.replay(self.feed.draws(batch["loader"], batch["iteration"], batch["number"]))
        self._hidden = States()
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def watch_dropout(self) -> None:
        """Sees active dropout until the next batch."""
        self._watched = True
        self.dropout.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Ends the step after the newest batch, and keeps its draws."""
        if self._watched:
            self._watched = False
            self.dropout.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        batch, self._newest = self._newest, None
        if batch is None:
            return
        self.tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        batch["draws"], batch["drawn"] = self.tape.count, self.tape.most
        values = values_drawn(self._hidden, States())
        batch["hidden"] = {name: number for name, number in values.items() if number}
        batch["flows"] = self.tape.flow.found() if self.tape.flow else []
        self.recorder.add("drew", hidden=" and ".join(batch["hidden"]), batch=batch["number"])
        draws, self.tape.draws = self.tape.draws, []
        if self.spec.purpose != "numbers":
            batch["draw_digest"] = digest([draw.outputs for draw in draws])
            return
        for number, draw in enumerate(draws):
            for place, output in enumerate(draw.outputs):
                name = f"draw/{batch['loader']}/{batch['iteration']}/{batch['number']}/{number}/{place}/{draw.name}"
                self.recorder.tensors[name] = output

    def close(self) -> None:
        """Ends the epochs that nobody has ended, as a limit of a Trainer leaves them."""
        self.leave()
        for epoch in list(self.open):
            epoch.end()
