"""Probes of the DataLoaders: which samples each epoch has, short epochs, and batches that are fed from other runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_mnist.doctor._private import LoaderIndices, graph_nodes, tree_leaves, tree_map, watch_workers
from lit_mnist.doctor.feed import Feed
from lit_mnist.doctor.probes.dropout import DropoutWatch
from lit_mnist.doctor.probes.samples import (
    SampleProbe,
    base_indices,
    describe_samples,
    generators,
    hidden_generators,
    seed_generators,
)
from lit_mnist.doctor.probes.wrap import wrap
from lit_mnist.doctor.recorder import Recorder, sample_digests
from lit_mnist.doctor.spec import Spec
from lit_mnist.doctor.tape import Tape

# Batches of an epoch without an optimizer step, for each step that is wanted.
_MOST_MICRO_BATCHES = 16
# Data sets of up to this many times `samples` are evaluated completely.
_COMPLETE = 20


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
        feed: Feed | None,
        finish: Callable[[], None],
        first_batch: Callable[[], None],
    ) -> None:
        self.recorder, self.spec, self.feed, self.finish, self.first_batch = recorder, spec, feed, finish, first_batch
        self.samples = SampleProbe(recorder, spec)
        self.tape = Tape()
        self.dropout = DropoutWatch(recorder)
        self._watched = False
        self.tape.recording = spec.purpose == "numbers" and feed is None
        self.iterations: dict[int, int] = {}
        self.training_epochs = 0
        self.open: list[ShortEpoch] = []
        self._loaders: list[Any] = []
        self._newest: dict[str, Any] | None = None
        self._hidden: dict[str, str] = {}

    def install(self) -> None:
        """Installs the probe."""
        watch_workers()
        wrap(DataLoader, "__iter__", self._on_iter)

    def _on_iter(self, original: Callable[..., Any], loader: Any) -> ShortEpoch:
        number = self.number(loader)
        for epoch in [epoch for epoch in self.open if epoch.loader == number]:
            epoch.end()
        self.seed()
        self.samples.prepare(loader, number, self.iterations.get(number, 0), self.training_epochs)
        return ShortEpoch(self, loader, original(loader))

    def seed(self) -> None:
        """Seeds the generators by the epoch, so that a resumed training has the same order and draws."""
        if self.spec.purpose in {"save", "resume", "whole"} and torch.is_grad_enabled():
            seed_generators(self.spec.seed + self.training_epochs + (self.spec.purpose == "resume"))

    def number(self, loader: Any) -> int:
        """Returns the number of a loader, in the order of first use."""
        for number, other in enumerate(self._loaders):
            if other is loader:
                return number
        self._loaders.append(loader)
        return len(self._loaders) - 1

    def enter(self, batch: dict[str, Any]) -> None:
        """Begins the step after a batch, and sees its random draws."""
        self._newest = batch
        self.tape.count = self.tape.most = 0
        if self.feed:
            self.tape.replay(self.feed.draws(batch["loader"], batch["iteration"], batch["number"]))
        self._hidden = hidden_generators()
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
        later = hidden_generators()
        hidden = [name for name, state in self._hidden.items() if later[name] != state]
        self.recorder.add("drew", hidden=" and ".join(hidden), batch=batch["number"])
        draws, self.tape.draws = self.tape.draws, []
        for number, draw in enumerate(draws):
            for place, output in enumerate(draw.outputs):
                name = f"draw/{batch['loader']}/{batch['iteration']}/{batch['number']}/{number}/{place}/{draw.name}"
                self.recorder.tensors[name] = output

    def close(self) -> None:
        """Ends the epochs that nobody has ended, as a limit of a Trainer leaves them."""
        self.leave()
        for epoch in list(self.open):
            epoch.end()


class ShortEpoch(Iterator[Any]):
    """An iterator over the first batches of an epoch.

    An epoch counts as training as soon as `backward` is called within it.
    """

    def __init__(self, probe: LoaderProbe, loader: Any, iterator: Any) -> None:
        self.probe, self.iterator = probe, iterator
        recorder = probe.recorder
        self.loader = probe.number(loader)
        probe.open.append(self)
        self.iteration = probe.iterations.get(self.loader, 0)
        probe.iterations[self.loader] = self.iteration + 1
        self.yielded, self.steps_before, self.backwards_before = 0, recorder.step, recorder.backwards
        self.indices = LoaderIndices(iterator)
        self.dataset = loader.dataset
        self.template: Any = None
        self.event = recorder.add(
            "epoch",
            **_describe(loader, self.indices),
            **describe_samples(loader),
            base=probe.samples.number(loader.dataset),
            loader=self.loader,
            iteration=self.iteration,
        )

    def __iter__(self) -> ShortEpoch:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)

    def __next__(self) -> Any:
        """Returns the next batch, or ends the epoch early."""
        probe = self.probe
        probe.leave()
        self._see_training()
        feeds = bool(probe.feed and probe.feed.trains(self.loader, self.iteration))
        if self._is_over() or (probe.feed and feeds and not probe.feed.has(self.loader, self.iteration, self.yielded)):
            self.end()
            raise StopIteration
        if self.yielded == 0:
            probe.seed()
        if self.event["gradients"]:
            probe.samples.seed_ranks()
        states = generators()
        try:
            batch = next(self.iterator)
            self.template = batch
        except StopIteration:
            if not feeds or self.template is None:
                self.event["complete"] = True
                self.end()
                raise
            batch = self.template
        if probe.feed and feeds:
            batch = probe.feed.batch(batch, self.loader, self.iteration, self.yielded)
        if probe.spec.double:
            batch = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)
        event = self._record(batch, states)
        self.yielded += 1
        self.event["yielded"] = self.yielded
        if self.event["gradients"]:
            probe.first_batch()
            probe.enter(event)
        if probe.spec.purpose == "train":
            probe.watch_dropout()
        return batch

    def _see_training(self) -> None:
        probe = self.probe
        if self.event["gradients"] and not self.event["trains"] and probe.recorder.backwards > self.backwards_before:
            self.event["trains"] = True
            self.event["epoch"] = probe.training_epochs
            probe.training_epochs += 1

    def _is_over(self) -> bool:
        spec = self.probe.spec
        late = self.probe.training_epochs > spec.epochs
        if self.event["trains"]:
            steps = 1 if late else spec.steps
            done = self.probe.recorder.step - self.steps_before
            return done >= steps or self.yielded >= _MOST_MICRO_BATCHES * steps
        if self.event["gradients"]:
            # Whether it trains is not known yet.
            return self.yielded >= _MOST_MICRO_BATCHES * spec.steps
        if late or spec.purpose == "numbers":
            return self.yielded >= 1
        size = self.event["samples"]
        if size is not None and size <= _COMPLETE * spec.samples:
            return False
        return (
            sum(len(part) for part in self.indices.lists[: self.yielded]) >= spec.samples
            or self.yielded >= spec.samples
        )

    def _record(self, batch: Any, states: dict[str, str]) -> dict[str, Any]:
        probe, recorder = self.probe, self.probe.recorder
        leaves = tree_leaves(batch)
        trains = self.event["gradients"]
        event = {
            "loader": self.loader,
            "iteration": self.iteration,
            "number": self.yielded,
            "indices": base_indices(self.dataset, self.indices.of_batch(self.yielded)),
            "size": next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 0),
            "draws": 0,
            "drawn": 0,
            "trains": trains,
            "generators": states,
        }
        if probe.spec.purpose == "train":
            event["samples"] = sample_digests(leaves)
            if trains:
                event["graph_nodes"] = graph_nodes()
        if trains and probe.spec.purpose == "numbers" and probe.feed is None:
            recorder.tensors |= Feed.tensors_of(batch, self.loader, self.iteration, self.yielded)
        return recorder.add("batch", **event)

    def end(self) -> None:
        """Completes the record of the epoch."""
        probe = self.probe
        if self not in probe.open:
            return
        probe.open.remove(self)
        self._see_training()
        self.event["drained"] = self.event["complete"] or self.indices.drain()
        if self.indices.is_iterable and probe.spec.purpose == "train" and not self.event["complete"]:
            self._drain_stream()
        self.event["indices"] = base_indices(self.dataset, list(itertools.chain(*self.indices.lists)))
        self.event["worker_generators"] = probe.samples.of_workers(self.loader, self.iteration)
        self.event["sizes"] = [len(part) for part in self.indices.lists]
        done = self.event["trains"] and probe.training_epochs >= probe.spec.epochs and probe.spec.purpose == "numbers"
        if done or probe.training_epochs > probe.spec.epochs + 10:
            probe.finish()

    def _drain_stream(self) -> None:
        """Loads more of a stream, to see its samples."""
        found: list[str] = []
        sizes: list[int] = []
        while len(found) < self.probe.spec.samples:
            try:
                batch = sample_digests(tree_leaves(next(self.iterator))) or [""]
                found += batch
                sizes.append(len(batch))
            except StopIteration:
                self.event["drained"] = True
                break
        self.event["later_samples"], self.event["later_sizes"] = found, sizes


def _describe(loader: Any, indices: LoaderIndices) -> dict[str, Any]:
    return {
        "sampler": None if indices.is_iterable else type(loader.sampler).__name__,
        "batch_sampler": type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else None,
        "dataset": type(loader.dataset).__name__,
        "workers": loader.num_workers,
        "iterable": indices.is_iterable,
        "samples": _length(loader.dataset),
        "batches": None if indices.is_iterable else _length(loader),
        "batch_size": loader.batch_size,
        "gradients": torch.is_grad_enabled(),
        "indices": [],
        "yielded": 0,
        "complete": False,
        "drained": False,
        "trains": False,
    }


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None
