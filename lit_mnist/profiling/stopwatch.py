"""Times the parts of an optimizer step in any engine, for `--run.trace times`.

A probe wraps a function that all engines call (data loading, network, backward pass, collectives, optimizer, step
monitor, checkpoint manager). The time of a part excludes the parts within it, and the remaining time is the engine's
loop. The probes are installed for 7 steps and removed for 7 steps, so that a run shows their cost. torch's profiler
would instead record every operation of a step.

All times are host times without synchronization. On a GPU, the time of a part is the time to queue its work, and the
computation is counted in the part in which the host waits for it.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lit_mnist.checkpoint.atomic_io import write_text
from lit_mnist.distributed.peer_exchange import PeerExchange
from lit_mnist.profiling.timer import (
    ALL_REDUCE,
    BACKWARD,
    BATCH_NORM,
    DATA,
    FORWARD,
    LOGGING,
    METRICS,
    OPTIMIZER,
    OUTSIDE,
    PROGRESS,
    Step,
    Timer,
    summarize,
)
from lit_mnist.profiling.torch_internals import hidden_all_reduce_ms, measure_every_step
from lit_mnist.profiling.trace import FOLDER

# Not a divisor of the steps between two updates of the display, so that the updates fall on both kinds of steps.
STEPS_WATCHED = 7
# Some names exist in older or newer releases of torch only.
_NAMES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast", "isend", "irecv")
_COLLECTIVES = (
    *((dist, name) for name in _NAMES if hasattr(dist, name)),
    (dist.Work, "wait"),
    (PeerExchange, "all_gather"),
)
# The functions of each part.
_CALLS: tuple[tuple[Any, str, str], ...] = (
    (F, "cross_entropy", FORWARD),
    (torch.nn.utils, "clip_grad_norm_", OPTIMIZER),
    *((torch.amp.GradScaler, name, OPTIMIZER) for name in ("scale", "unscale_", "step", "update", "get_scale")),
    (Optimizer, "zero_grad", OPTIMIZER),
    (LRScheduler, "step", OPTIMIZER),
)
# The part of a collective by the part that calls it. In all other parts it belongs to the caller.
_PART_OF_COLLECTIVE = {FORWARD: BATCH_NORM, BACKWARD: BATCH_NORM, OUTSIDE: ALL_REDUCE}


class Stopwatch:
    """Times the parts of the steps of a rank, and writes them to `trace/times-rankN.json`.

    Args:
        monitor: The step monitor of this rank.
        folder: The run folder.
        loaders: The classes of the train loaders.
        calls: Further functions to time: an object or class, the name of its function, and the part.
    """

    def __init__(
        self, monitor: Any, folder: Path, loaders: Sequence[type], calls: Sequence[tuple[Any, str, str]]
    ) -> None:
        self.monitor, self.folder, self._loaders, self._calls = monitor, folder, loaders, (*_CALLS, *calls)
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
        """Installs the probes."""
        clock = self.monitor.clock
        # For the whole run, since the loader of an epoch is iterated once.
        for loader in self._loaders:
            self._replace(loader, "__iter__", self._batches(loader.__iter__))  # type: ignore[attr-defined]
        self._replace(DistributedDataParallel, "forward", self._first_forward(DistributedDataParallel.forward))
        self._replace(clock, "pause", functools.partial(self._pause, clock.pause))
        self._always = len(self._undo)
        self._install_probes()

    def on_step_end(self) -> None:
        """Ends a step, at the same time as the step clock."""
        timer, before = self._timer, self._ended
        timer.switch(timer.running)
        self._ended = time.perf_counter()
        has_probes, place = len(self._undo) > self._always, self._done % STEPS_WATCHED
        if before is not None:
            self._steps.append(Step(self._ended - before, self._own, timer.spent if has_probes else None, place > 0))
        self._done += 1
        if self._done % STEPS_WATCHED == 0:
            self._remove_probes() if has_probes else self._install_probes()
        timer.restart()
        self._own = time.perf_counter() - self._ended

    def close(self) -> None:
        """Removes the probes, and writes the file."""
        self._always = 0
        self._remove_probes()
        hidden, self._model = hidden_all_reduce_ms(self._model) if self._model else None, None
        content = {**summarize(self._steps), "hidden_all_reduce_ms": hidden}
        (folder := self.folder / FOLDER).mkdir(exist_ok=True)
        write_text(folder / f"times-rank{self.monitor.rank.rank}.json", json.dumps(content, indent=2) + "\n")

    def _install_probes(self) -> None:
        monitor, timer, net = self.monitor, self._timer, self.monitor.net
        for place, name, part in self._calls:
            self._probe(place, name, part)
        last = "on_step_end" if hasattr(monitor, "on_step_end") else "end_step"
        for name, part in (("on_batch_end", METRICS), ("on_before_optimizer_step", METRICS), (last, LOGGING)):
            self._probe(monitor, name, part)
        if monitor.display:
            self._probe(monitor.display, "update", PROGRESS)
        for place, name in _COLLECTIVES:
            self._probe(place, name)
        self._replace(torch.Tensor, "backward", self._backward(torch.Tensor.backward))
        hooks: list[Any] = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(lambda *_: timer.leave()),
        ]
        if hasattr(net, "training_step"):
            # Lightning calls it instead of the forward pass.
            self._probe(net, "training_step", FORWARD)
        else:
            hooks += [
                net.register_forward_pre_hook(lambda net, _: timer.enter(FORWARD) if net.training else None),
                net.register_forward_hook(lambda net, *_: timer.leave() if net.training else None),
            ]
        if monitor.rank.world_size > 1:
            weights = [weight for weight in net.parameters() if weight.requires_grad]
            hooks += [weight.register_post_accumulate_grad_hook(self._gradient_done) for weight in weights]
        self._undo += [hook.remove for hook in hooks]

    def _remove_probes(self) -> None:
        while len(self._undo) > self._always:
            self._undo.pop()()

    def _replace(self, place: Any, name: str, new: Callable[..., Any]) -> None:
        own = vars(place).get(name)
        setattr(place, name, new)
        self._undo.append(functools.partial(setattr, place, name, own) if own else lambda: delattr(place, name))

    def _probe(self, place: Any, name: str, part: str | None = None) -> None:
        self._replace(place, name, self._timed(getattr(place, name), part))

    def _timed(self, original: Callable[..., Any], part: str | None) -> Callable[..., Any]:
        timer = self._timer

        @functools.wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            timer.enter(part or self._part_of_collective())
            try:
                return original(*arguments, **options)
            finally:
                timer.leave()

        return timed

    def _part_of_collective(self) -> str:
        return _PART_OF_COLLECTIVE.get(self._timer.running, self._timer.running)

    def _batches(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def batches(loader: Any) -> Iterator[Any]:
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
                # After the last gradient, the backward pass only waits for the all-reduce.
                timer.switch(ALL_REDUCE, self._last_gradient)
            timer.leave()

        return backward

    def _gradient_done(self, _: torch.Tensor) -> None:
        # On a GPU, autograd calls it in a separate thread.
        self._last_gradient = time.perf_counter()

    def _step_begins(self, _: Optimizer, arguments: Any, options: Any) -> tuple[Any, Any]:
        """Starts the optimizer's part, from which the closure of a step is excluded."""
        self._timer.enter(OPTIMIZER)
        arguments = tuple(self._outside(value) for value in arguments)
        return arguments, {name: self._outside(value) for name, value in options.items()}

    def _outside(self, value: Any) -> Any:
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
