"""The watch in a rank: what it records every few optimizer steps."""

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import util
from pathlib import Path
from typing import Any, TextIO, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler, RandomSampler

from ddp_doctor.probes.wrap import before
from ddp_doctor.torch_internals import on_indices

# Optimizer steps between two records, at least.
_EVERY = 10
# Share of the run's time that the watch may take: the distance between records doubles while it takes more.
_SHARE = 0.01
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# At most about so many samples of an epoch are kept, the same ones on every rank.
_KEPT, _FACTOR = 1 << 16, 0x9E3779B1


@dataclass(eq=False)
class Epoch:
    """What a rank has taken of one epoch.

    Attributes:
        loader: The number of its loader.
        number: Its own number, from 0.
        part: One in so many samples is kept.
        shuffles: Whether another epoch should have another order.
        steps: Optimizer steps that used its batches.
    """

    loader: int
    number: int
    part: int
    shuffles: bool
    steps: int = 0
    _new: list[int] = field(default_factory=list)

    def take(self, indices: list[int]) -> None:
        """Takes the indices of a batch."""
        # A product has no pattern that the parts of the ranks could share.
        self._new += [index for index in indices if (index * _FACTOR >> 7) % self.part == 0]

    def news(self) -> dict[str, Any]:
        """Returns the samples since the last call, in their order."""
        new, self._new = self._new, []
        return {"loader": self.loader, "epoch": self.number, "samples": new, "shuffles": self.shuffles}


class Watch:
    """Records the state of one rank. An error ends the watch, not the run.

    Args:
        folder: Where the ranks write their records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._every = folder, _EVERY
        self._models: list[nn.Module] = []
        # The last two epochs of each loader, by what gives its indices.
        self._epochs: WeakKeyDictionary[Any, list[Epoch]] = WeakKeyDictionary()
        self._loaders = itertools.count()
        # That of the last batch.
        self._last: Epoch | None = None
        self._begun, self._spent, self._ended = time.perf_counter(), 0.0, False
        self._file: TextIO | None = None
        self._steps: dict[Optimizer, int] = {}
        self._waiting: tuple[dict[str, Any], torch.Tensor, torch.cuda.Event] | None = None
        self._averagers: list[ModelAverager] = []

    def install(self) -> None:
        """Begins to watch."""
        register_optimizer_step_pre_hook(self._before_step)
        before(DistributedDataParallel, "__init__", lambda model, *_, **__: self._models.append(model))
        before(ModelAverager, "__init__", lambda averager, *_, **__: self._averagers.append(averager))
        on_indices(self._on_indices, self._on_batch)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Counts the seconds of the body, and lets an error in it end the watch."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")
        finally:
            self._spent += time.perf_counter() - begun

    def _on_indices(self, iterator: Any, indices: list[int]) -> None:
        if not self._ended:
            with self._guard():
                self._epoch_of(iterator).take(indices)

    def _on_batch(self, iterator: Any) -> None:
        if not self._ended:
            with self._guard():
                self._last = self._epoch_of(iterator)

    def _epoch_of(self, iterator: Any) -> Epoch:
        """Returns the epoch of a loader's iterator, which has several with persistent workers."""
        drawn, epoch = vars(iterator).get("watch_epoch", (None, None))
        if drawn is iterator._sampler_iter:
            return cast(Epoch, epoch)
        batches = iterator._index_sampler
        sampler = getattr(batches, "sampler", batches)
        shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
        shuffles |= isinstance(sampler, DistributedSampler) and sampler.shuffle
        part = 16
        with suppress(TypeError, AttributeError):
            part = 1 + len(iterator._dataset) // _KEPT
        epochs = self._epochs.setdefault(batches, [])
        loader, number = (epochs[-1].loader, epochs[-1].number + 1) if epochs else (next(self._loaders), 0)
        epochs[:] = [*epochs[-1:], Epoch(loader, number, part, shuffles)]
        iterator.watch_epoch = iterator._sampler_iter, epochs[-1]
        return epochs[-1]

    def _news(self) -> list[dict[str, Any]]:
        """Returns what was taken since the last call. A loader without steps is not trained with."""
        epochs = [epoch for epochs in self._epochs.values() for epoch in epochs if epoch.steps > 1]
        return [new for epoch in epochs if (new := epoch.news())["samples"]]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._ended:
            with self._guard():
                self._observe(optimizer)

    def _observe(self, optimizer: Optimizer) -> None:
        # Before the step: a program that averages the weights after each step has done so.
        step = self._steps.setdefault(optimizer, 0)
        number = list(self._steps).index(optimizer)
        if number == 0 and self._last is not None:
            self._last.steps += 1
        if step % self._every == 0:
            self._record(optimizer, number, step)
            if self._spent > _SHARE * (time.perf_counter() - self._begun) and step >= 10 * self._every:
                self._every *= 2
        self._steps[optimizer] += 1

    def _record(self, optimizer: Optimizer, number: int, step: int) -> None:
        self._write_waiting()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Not a shard (a DTensor).
        whole = [parameter for parameter in parameters if type(parameter) in {torch.Tensor, nn.Parameter}]
        record: dict[str, Any] = {
            "optimizer": number,
            "step": step,
            "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "eval": any(not any(module.training for module in model.modules()) for model in self._models),
            "epochs": self._news(),
        }
        if step == 0:
            models = [model.named_parameters() for model in self._models]
            names = {id(parameter): name.removeprefix("module.") for model in models for name, parameter in model}
            record["names"] = [names.get(id(parameter), f"parameter {n}") for n, parameter in enumerate(parameters)]
            record["wrapped"], record["sharded"] = bool(self._models), len(whole) < len(parameters)
        if self._averagers or len({parameter.device for parameter in whole}) != 1:
            # Weights that are averaged from time to time differ, and digests are of one device.
            self._write(record)
            return
        found = digests(whole)
        if found.is_cuda:
            # Reading it now would wait for the GPU: the next record does.
            self._waiting = record, found.to("cpu", non_blocking=True), torch.cuda.Event()
            self._waiting[2].record()
        else:
            self._write({**record, "weights": found.tolist()})

    def _write_waiting(self) -> None:
        if self._waiting is not None:
            record, found, copied = self._waiting
            self._waiting = None
            copied.synchronize()
            self._write({**record, "weights": found.tolist()})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or 0)
            # Unlike those of atexit, it is also called at the end of a process of multiprocessing.
            util.Finalize(None, self._end, exitpriority=100)
            # Ranks may be started again.
            self._file = (self.folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _end(self, why: str = "") -> None:
        """Ends the watch, and says why if the process goes on. The run is worth more than its watch."""
        if self._ended:
            return
        self._ended = True
        with suppress(OSError, ValueError, RuntimeError):
            self._write_waiting()
            if self._file is not None:
                share = self._spent / (time.perf_counter() - self._begun)
                self._write({"end": why, "steps": [*self._steps.values()], "share": share, "epochs": self._news()})
                self._file.close()


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns an int64 tensor of shape (tensors,) on the device of the tensors: the sum of the bits of each.

    They are equal if and, but for chance, only if the tensors are, at the cost of reading them once.

    Args:
        tensors: At least one tensor; all on one device.
    """
    values = [tensor.detach() for tensor in tensors]
    plain = [torch.view_as_real(value) if value.is_complex() else value for value in values]
    return torch.stack([value.view(_SAME_SIZE[value.element_size()]).sum(dtype=torch.int64) for value in plain])
