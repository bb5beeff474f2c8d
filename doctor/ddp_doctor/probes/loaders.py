"""Probes of the DataLoaders: short epochs, which samples each of them has, and what its batches are."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ddp_doctor.after_import import after_import
from ddp_doctor.probes.draws import DrawProbe
from ddp_doctor.probes.generators import OwnGenerators, generators
from ddp_doctor.probes.micro_batches import MicroBatchProbe, RankBatches
from ddp_doctor.probes.samples import SampleProbe, base_indices, below_subsets, describe_loader
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.records.recorder import Recorder, agreed, caller, number_of, sample_digests, user_frames
from ddp_doctor.records.spec import Spec
from ddp_doctor.torch_internals import drain, graph_nodes, index_lists, on_indices, tree_leaves, tree_map, without_modes

# Batches of an epoch without an optimizer step, for each step that is wanted.
_MOST_MICRO_BATCHES = 16
# Data sets of up to this many times `samples` are evaluated completely.
_COMPLETE = 20
# Of larger data sets, the order of the first epochs alone is recorded to the end.
_LARGE = 100_000
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"


class ShortEpoch(Iterator[Any]):
    """An iterator over the first batches of an epoch.

    An epoch counts as training as soon as `backward` is called within it.
    """

    def __init__(self, probe: LoaderProbe, loader: Any, iterator: Any, number: int, iteration: int) -> None:
        self.probe, self.iterator = probe, iterator
        recorder = probe.recorder
        self.loader, self.iteration = number, iteration
        probe.open.append(self)
        self.yielded, self.steps_before, self.backwards_before = 0, recorder.step, recorder.backwards
        self.samples = 0
        self.first_steps = 0
        self.lists, self.source = index_lists(iterator), loader
        probe.own.find()
        self.template: Any = None
        self.event = recorder.add(
            "epoch",
            **describe_loader(loader),
            base=number_of(below_subsets(loader.dataset), probe.samples.datasets),
            loader=self.loader,
            iteration=self.iteration,
            by=caller(),
            endless=self._is_endless(),
            predicts=recorder.predicts,
            worker_generators=[],
        )

    def _is_endless(self) -> bool:
        """Returns whether the program begins the loader again wherever it ends, as `while True: yield from loader`."""
        frame, known = next(user_frames(), None), self.probe.generators.get(self.loader)
        if frame and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = None
        # The reference keeps the identity from being used again.
        self.probe.generators[self.loader] = frame
        return (frame is not None and frame is known) or isinstance(sys.exc_info()[1], StopIteration)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)

    def __next__(self) -> Any:
        """Returns the next batch, or ends the epoch early."""
        probe = self.probe
        probe.draws.leave()
        self._see_training()
        self._see_steps()
        feeds = bool(probe.feed and probe.feed.has(self.loader, self.iteration, 0))
        takes_turns = bool(probe.micro and probe.micro.plan) and bool(self.event["gradients"])
        missing = probe.feed and feeds and not probe.feed.has(self.loader, self.iteration, self.yielded)
        self._go_on()
        if missing or (self._is_over() and not takes_turns):
            probe.shortened = True
            self._stop()
            raise StopIteration
        if self.event["gradients"]:
            probe.samples.seed_ranks()
        states, own = generators(), probe.own.states()
        try:
            batch = next(self.iterator)
            self.template = batch
        except StopIteration:
            if not (feeds or takes_turns) or self.template is None:
                self.event["complete"] = True
                self._stop()
                raise
            batch = self.template
        if probe.feed and feeds:
            batch = probe.feed.batch(batch, self.loader, self.iteration, self.yielded, self._collated)
        batch = _double(batch, probe.spec)
        if probe.micro and self.event["gradients"]:
            batch = probe.micro.loaded(self.loader, batch)
        batch = probe.samples.perturbed(batch, self.loader)
        event = self._record(batch, states)
        event["at_step"] = generators()
        event["own_loading"] = sorted(probe.own.drawn(own))
        self.yielded += 1
        self.samples += max(event["size"], 1)
        self.event["yielded"] = self.yielded
        if self.event["gradients"]:
            probe.first_batch()
        probe.draws.enter(event, batch)
        return batch

    def _collated(self, indices: list[int]) -> Any:
        """Returns a batch with these indices of the data set; None if the loader makes none of indices."""
        if self.source.batch_sampler is None or self.event["iterable"]:
            return None
        return _double(self.source.collate_fn([self.source.dataset[index] for index in indices]), self.probe.spec)

    def _see_training(self) -> None:
        probe = self.probe
        if self.event["gradients"] and not self.event["trains"] and probe.recorder.backwards > self.backwards_before:
            self.event["trains"] = True
            # Two loaders of one loop, such as those of a GAN, have one epoch.
            others = (other for other in probe.open if other.backwards_before == self.backwards_before)
            known = next((other.event["epoch"] for other in others if "epoch" in other.event), None)
            self.event["epoch"] = probe.training_epochs if known is None else known
            probe.training_epochs += known is None

    def _see_steps(self) -> None:
        """Learns from the first two batches whether each of them has the same number of optimizer steps."""
        done = self.probe.recorder.step - self.steps_before
        if self.probe.steps_per_batch is None and self.event["trains"]:
            if self.yielded == 1:
                self.first_steps = done
            elif self.yielded == 2:
                self.probe.steps_per_batch = done // 2 if done == 2 * self.first_steps else 0

    def _go_on(self) -> None:
        """Ends the numbers instead of the epoch, if the program is to train on, after the step that is left."""
        probe = self.probe
        goes_on = probe.spec.later and not probe.recorder.later and not probe.ending
        if goes_on and self.event["trains"] and self._is_over():
            if self._has_unused():
                probe.ending = True
            else:
                probe.finish()

    def _has_unused(self) -> bool:
        """Returns whether a loader fetches a batch ahead, such as Accelerate's, and the last one was not used yet."""
        return self.probe.recorder.backwards - self.backwards_before < self.yielded

    def _is_over(self) -> bool:
        spec = self.probe.spec
        if spec.later and self.probe.ending:
            # The step before the program trains on.
            return False
        if spec.whole_epochs and spec.purpose == "train":
            return False
        late = self.probe.training_epochs > self.probe.epochs
        if self.event["trains"]:
            steps = 1 if late else spec.most_steps if self.probe.recorder.later else spec.steps
            # Where a rank skips a step by its own decision, the epochs of the ranks must not end apart.
            due = self.yielded * (self.probe.steps_per_batch or 0)
            done = max(due, self.probe.recorder.step - self.steps_before)
            return done >= steps or self.yielded >= _MOST_MICRO_BATCHES * steps
        if self.event["gradients"]:
            # Whether it trains is not known yet.
            return self.yielded >= _MOST_MICRO_BATCHES * spec.steps
        if spec.purpose == "numbers":
            return self.yielded >= 1
        size = self.event["samples"]
        if size is not None and size <= (1 if late else _COMPLETE) * spec.samples:
            return False
        if late:
            return self.yielded >= 1
        return self.samples >= spec.samples

    def _record(self, batch: Any, states: dict[str, str]) -> dict[str, Any]:
        probe, recorder = self.probe, self.probe.recorder
        leaves = tree_leaves(batch)
        trains = self.event["gradients"]
        indices = self.lists[self.yielded] if self.yielded < len(self.lists) else []
        event = {
            "loader": self.loader,
            "iteration": self.iteration,
            "number": self.yielded,
            "indices": base_indices(self.source.dataset, indices),
            "size": next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 0),
            "drawn": 0,
            "trains": trains,
            "generators": states,
        }
        if probe.spec.purpose == "train":
            event["samples"] = sample_digests(leaves)
            if trains:
                event["graph_nodes"] = graph_nodes()
        if trains and probe.spec.purpose == "numbers" and probe.feed is None and not probe.ending:
            name = f"{self.loader}/{self.iteration}/{self.yielded}"
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    recorder.keep(f"batch/{name}/{place}", leaf)
            with suppress(TypeError, ValueError, RuntimeError):
                # An index may be anything.
                recorder.keep(f"indices/{name}", torch.tensor(indices, dtype=torch.long))
        return recorder.add("batch", **event)

    def _stop(self) -> None:
        """Ends the epoch where the program asks for a batch after the last one: its loop has ended."""
        self.probe.recorder.add("stop", loader=self.loader, iteration=self.iteration, trains=self.event["trains"])
        self.end()

    def end(self) -> None:
        """Completes the record of the epoch."""
        probe = self.probe
        if self not in probe.open:
            return
        probe.open.remove(self)
        self._see_training()
        self.event["drained"] = self.event["complete"] or self._drain()
        positions = list(itertools.chain(*self.lists))
        self.event["indices"] = base_indices(self.source.dataset, positions)
        # In the data set of the loader: a Subset may have another order.
        self.event["ascending"] = positions == sorted(set(positions))
        self.event["worker_generators"] = probe.samples.of_workers(self.loader, self.iteration)
        self.event["sizes"] = list(map(len, self.lists))
        if self.event["trains"] and probe.is_alone(soon=True):
            return
        numbers = probe.spec.purpose == "numbers" and not probe.recorder.later
        done = numbers and self.event["trains"] and probe.training_epochs >= probe.epochs
        if done and self._has_unused():
            # After the next optimizer step, or before the next epoch. The draws belong to a batch until then.
            probe.ending = True
            last = {"loader": self.loader, "iteration": self.iteration, "number": self.yielded, "trains": True}
            probe.draws.leave()
            probe.draws.enter(last, None)
        elif done or probe.is_last(trains=self.event["trains"]):
            probe.finish()

    def _drain(self) -> bool:
        """Takes the rest of the order, of large data sets in the first epochs alone; returns whether it ended."""
        probe, spec = self.probe, self.probe.spec
        is_first = spec.purpose != "numbers" and max(probe.training_epochs, self.iteration + 1) <= probe.epochs
        is_small = (self.event["samples"] or 0) <= _LARGE
        return not self.event["iterable"] and (is_first or is_small) and drain(self.iterator)


def _double(batch: Any, spec: Spec) -> Any:
    """Returns a batch with its fractions in 64 bits, if everything is computed in these."""
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch) if spec.double else batch


# A program that has more epochs than are wanted is ended after so many of them, or so many seconds.
_MOST_EPOCHS, _MOST_SECONDS = 10, 20.0
_LAST_EPOCH = "last_epoch"


class LoaderProbe:
    """Observes the DataLoaders.

    Attributes:
        finish: Called when everything that is wanted was seen; returns if the program is to train on after the numbers.
        first_batch: Called with each training batch, before it is given to the user's code.
        is_alone: Whether the others wait for what this rank trains alone, so that the run must not end.
    """

    def __init__(
        self, recorder: Recorder, spec: Spec, feed: RankBatches | None = None, micro: MicroBatchProbe | None = None
    ) -> None:
        self.recorder, self.spec, self.feed, self.micro = recorder, spec, feed, micro
        self.finish: Callable[[], None] = lambda: None
        self.first_batch: Callable[[], None] = lambda: None
        self.is_alone: Callable[..., bool] = lambda **_: False
        self.samples = SampleProbe(recorder, spec)
        self.own = OwnGenerators()
        self.draws = DrawProbe(recorder, spec, feed, self.own)
        # The generator function of the user that has begun each loader.
        self.generators: dict[int, FrameType | None] = {}
        # Optimizer steps after each batch of the first epoch; 0 if they vary or the program fetches batches ahead.
        self.steps_per_batch: int | None = None
        self.training_epochs = 0
        self.shortened = self.ending = False
        self.open: list[ShortEpoch] = []
        # In the order of first use.
        self._loaders: list[Any] = []
        self._since = 0.0

    @property
    def epochs(self) -> int:
        """Training epochs of the usual length in this part of the run."""
        return 2 if self.recorder.later else self.spec.epochs

    @property
    def trains(self) -> bool:
        """Whether the training takes its batches from a loader."""
        return self.training_epochs > 0 or any(epoch.event["gradients"] for epoch in self.open)

    def install(self) -> None:
        """Installs the probe."""
        on_indices(lambda iterator, indices: index_lists(iterator).append(indices), lambda iterator: None)
        wrap(DataLoader, "__iter__", self._on_iter)
        # It is a DataLoader with an `__iter__` of its own.
        after_import({_STATEFUL: lambda module: wrap(module.StatefulDataLoader, "__iter__", self._on_iter)})
        before(
            DistributedSampler, "set_epoch", lambda sampler, epoch: self.recorder.add("set_epoch", number=int(epoch))
        )

    def _on_iter(self, original: Callable[..., Any], loader: Any) -> Iterator[Any]:
        number = number_of(loader, self._loaders)
        iteration = sum(event["kind"] == "epoch" and event["loader"] == number for event in self.recorder.events)
        for epoch in [epoch for epoch in self.open if epoch.loader == number]:
            epoch.end()
        if self.ending:
            self.finish()
        self.samples.prepare(loader, number, iteration, self.training_epochs)
        # The seed of the workers is drawn here, which is no draw of the step.
        with without_modes():
            iterator = original(loader)
        return ShortEpoch(self, loader, iterator, number, iteration)

    def forget(self) -> None:
        """Forgets the loaders so far."""
        self.draws.leave()
        self.open.clear()
        self._loaders.clear()
        self.generators.clear()
        self.samples.datasets.clear()
        self.training_epochs = 0

    def is_last(self, *, trains: bool) -> bool:
        """Returns whether the run ends with this epoch.

        The first rank that has been late for long enough decides it for the epoch after its own, which no other rank
        has ended.
        """
        late = self.training_epochs - self.epochs
        if late > _MOST_EPOCHS:
            return True
        if late < 0 or not trains or (self.spec.purpose != "train" and not self.recorder.later):
            return False
        self._since = self._since or time.monotonic()
        path, too_late = self.recorder.folder / _LAST_EPOCH, time.monotonic() > self._since + _MOST_SECONDS
        return self.training_epochs >= agreed(path, self.training_epochs + 1, late=too_late)

    def close(self) -> None:
        """Ends the epochs that nobody has ended, as a limit of a Trainer leaves them."""
        self.draws.leave()
        for epoch in list(self.open):
            epoch.end()
