"""Where a rank's time goes: the parts of an optimizer step, each timed where every engine calls it.

`--run.trace times` puts a probe around the functions that all engines share (the batches, the network, the backward
pass, the collectives, the optimizer, the recorder, the manager) and takes it away at the training's end. The time of a
part is its own alone: what a probe within it sees is left out of it. What no probe sees is the engine's loop. Every few
steps the probes are taken away for as many: so the steps of one and the same run tell what the probes themselves cost.

All times are the host's, and nothing is synchronised for them: on a GPU a part is the time that it takes to queue its
work, and the computing shows where the host waits for it.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lit_mnist.checkpoint.atomic_io import write_text
from lit_mnist.checkpoint.manager import CheckpointManager
from lit_mnist.data.loader import Batch, TrainBatches
from lit_mnist.distributed.peer_exchange import PeerExchange
from lit_mnist.distributed.rank import Rank
from lit_mnist.profiling._private import hidden_all_reduce_ms, measure_every_step
from lit_mnist.profiling.timer import (
    ALL_REDUCE,
    BACKWARD,
    BATCH_NORM,
    COPY,
    DATA,
    FORWARD,
    KEEPING,
    LOGGING,
    METRICS,
    OPTIMIZER,
    OUTSIDE,
    PROGRESS,
    Step,
    Timer,
    summary,
)
from lit_mnist.profiling.trace import FOLDER
from lit_mnist.run.timing import StepClock

# No divisor of the steps between two figures on the screen, so that these fall on both kinds of steps.
STEPS_WATCHED = 7
# Some by the names of older releases of torch or of newer ones.
_NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast", "isend", "irecv")
_COLLECTIVES = (
    *((dist, name) for name in _NAMES if hasattr(dist, name)),
    (dist.Work, "wait"),
    (PeerExchange, "all_gather"),
)
# Where each part is called, by every engine.
_CALLS: tuple[tuple[Any, str, str], ...] = (
    (Batch, "to", COPY),
    (F, "cross_entropy", FORWARD),
    (torch.nn.utils, "clip_grad_norm_", OPTIMIZER),
    *((torch.amp.GradScaler, name, OPTIMIZER) for name in ("scale", "unscale_", "step", "update", "get_scale")),
    (Optimizer, "zero_grad", OPTIMIZER),
    (LRScheduler, "step", OPTIMIZER),
    (CheckpointManager, "step_done", KEEPING),
)
# What a collective is for, by the part that calls it; others, such as the recorder, pay for their own.
_PURPOSES = {FORWARD: BATCH_NORM, BACKWARD: BATCH_NORM, OUTSIDE: ALL_REDUCE}


class Measured(Protocol):
    """What the stopwatch needs to know of a training: the recorder has it."""

    rank: Rank
    net: nn.Module
    clock: StepClock

    @property
    def display(self) -> object | None:
        """The progress display of rank 0."""


class Stopwatch:
    """Times the parts of a rank's steps, from `start` to `close`, which writes `trace/times-rankN.json`.

    Args:
        recorder: The rank's recorder, which has a network and a clock, and tells each step.
        folder: The run folder.
    """

    def __init__(self, recorder: Measured, folder: Path) -> None:
        self.recorder, self.folder = recorder, folder
        self._timer = Timer()
        self._steps: list[Step] = []
        self._done = 0
        self._own = 0.0
        self._ended: float | None = None
        self._last_gradient: float | None = None
        self._model: DistributedDataParallel | None = None
        self._undo: list[Callable[[], None]] = []
        self._always = 0

    def start(self) -> None:
        """Begins to keep the time."""
        clock = self.recorder.clock
        # For the whole run: an epoch's loader is asked once for all its batches.
        self._replace(TrainBatches, "__iter__", self._batches(TrainBatches.__iter__))
        self._replace(DistributedDataParallel, "forward", self._first_forward(DistributedDataParallel.forward))
        self._replace(clock, "pause", functools.partial(self._pause, clock.pause))
        self._always = len(self._undo)
        self._watch()

    def step_done(self) -> None:
        """Ends a step; it is called where the clock's step ends, too."""
        timer, before = self._timer, self._ended
        timer.switch(timer.running)
        self._ended = time.perf_counter()
        watches, place = len(self._undo) > self._always, self._done % STEPS_WATCHED
        if before is not None:
            self._steps.append(Step(self._ended - before, self._own, timer.spent if watches else None, place > 0))
        self._done += 1
        if self._done % STEPS_WATCHED == 0:
            self._look_away() if watches else self._watch()
        timer.restart()
        self._own = time.perf_counter() - self._ended

    def close(self) -> None:
        """Takes the probes away, and writes the file."""
        self._always = 0
        self._look_away()
        hidden, self._model = hidden_all_reduce_ms(self._model) if self._model else None, None
        content = {**summary(self._steps), "hidden_all_reduce_ms": hidden}
        (folder := self.folder / FOLDER).mkdir(exist_ok=True)
        write_text(folder / times_file(self.recorder.rank.rank), json.dumps(content, indent=2) + "\n")

    def _watch(self) -> None:
        recorder, timer = self.recorder, self._timer
        for place, name, part in _CALLS:
            self._probe(place, name, part)
        for name, part in (("batch_done", METRICS), ("gradients_done", METRICS), ("step_done", LOGGING)):
            self._probe(recorder, name, part)
        if recorder.display:
            self._probe(recorder.display, "update", PROGRESS)
        for place, name in _COLLECTIVES:
            self._probe(place, name)
        self._replace(torch.Tensor, "backward", self._backward(torch.Tensor.backward))
        hooks = [
            recorder.net.register_forward_pre_hook(lambda net, _: timer.enter(FORWARD) if net.training else None),
            recorder.net.register_forward_hook(lambda net, *_: timer.leave() if net.training else None),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(lambda *_: timer.leave()),
        ]
        if recorder.rank.world_size > 1:
            weights = recorder.net.parameters()
            hooks += [weight.register_post_accumulate_grad_hook(self._gradient_done) for weight in weights]
        self._undo += [hook.remove for hook in hooks]

    def _look_away(self) -> None:
        while len(self._undo) > self._always:
            self._undo.pop()()

    def _replace(self, place: Any, name: str, new: Callable[..., Any]) -> None:
        """Puts a function in another's place until `close`, which leaves no trace of it."""
        own = vars(place).get(name)
        setattr(place, name, new)
        self._undo.append(functools.partial(setattr, place, name, own) if own else lambda: delattr(place, name))

    def _probe(self, place: Any, name: str, part: str | None = None) -> None:
        self._replace(place, name, self._timed(getattr(place, name), part))

    def _timed(self, original: Callable[..., Any], part: str | None) -> Callable[..., Any]:
        timer = self._timer

        @functools.wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            timer.enter(part or self._purpose())
            try:
                return original(*arguments, **options)
            finally:
                timer.leave()

        return timed

    def _purpose(self) -> str:
        return _PURPOSES.get(self._timer.running, self._timer.running)

    def _batches(self, original: Callable[..., Iterator[Batch]]) -> Callable[..., Iterator[Batch]]:
        def batches(loader: TrainBatches) -> Iterator[Batch]:
            following = self._timed(original(loader).__next__, DATA)
            with suppress(StopIteration):
                while True:
                    yield following()

        return batches

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        timer = self._timer

        def backward(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
            self._last_gradient = None
            timer.enter(BACKWARD)
            original(loss, *arguments, **options)
            if self._last_gradient is not None and timer.running == BACKWARD:
                # After the last gradient a backward pass only waits for the ranks to share them.
                timer.switch(ALL_REDUCE, self._last_gradient)
            timer.leave()

        return backward

    def _gradient_done(self, _: torch.Tensor) -> None:
        # On a GPU another thread of the backward pass calls it.
        self._last_gradient = time.perf_counter()

    def _step_begins(self, _: Optimizer, arguments: Any, options: Any) -> tuple[Any, Any]:
        """Begins an optimizer's step; the forward and backward passes that it may be given to make are not its own."""
        self._timer.enter(OPTIMIZER)
        arguments = tuple(self._apart(value) for value in arguments)
        return arguments, {name: self._apart(value) for name, value in options.items()}

    def _apart(self, value: Any) -> Any:
        return self._timed(value, OUTSIDE) if callable(value) else value

    def _first_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(model: DistributedDataParallel, *arguments: Any, **options: Any) -> Any:
            if self._model is None:
                self._model = model
                measure_every_step(model)
            return original(model, *arguments, **options)

        return forward

    def _pause(self, original: Callable[[], None]) -> None:
        self._ended = None
        original()


def times_file(rank: int) -> str:
    """Returns the name of a rank's file in the run folder's `trace`."""
    return f"times-rank{rank}.json"
