"""The watch in a rank: what it records every few optimizer steps."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import wraps
from multiprocessing import util
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_doctor.after_import import AfterImport
from ddp_doctor.watch.digests import digests, group_size, is_whole
from ddp_doctor.watch.samples import SampleSketch
from ddp_doctor.watch.state import generator_digest, in_evaluation, names_of

EVERY = 10
# Share of the run's time that the watch may take: the distance between records doubles while it takes more.
_SHARE = 0.01
_AVERAGERS = "torch.distributed.algorithms.model_averaging.averagers"


def watch(folder: str | Path, model: nn.Module | None = None, every: int = EVERY) -> Watch:
    """Watches this process from now on; every rank calls it, with one folder.

    Args:
        folder: A folder that all ranks see. It is made if needed; records of an earlier run in it are replaced.
        model: The model, for the names of its parameters and its mode. A DistributedDataParallel that is made later is
            found without it.
        every: Optimizer steps between two records, at least.

    Returns:
        The watch. `close()` ends it; otherwise it ends with the process. Rank 0 writes `folder/watch.json`.
    """
    found = Watch(Path(folder), every, compares=True)
    if model is not None:
        found.models.append(model)
    found.install()
    return found


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Lets an error end the watch, not the run."""

    @wraps(method)
    def call(self: Watch, *args: Any, **kwargs: Any) -> None:
        if self.ended or os.getpid() != self.owner:
            return
        begun = time.perf_counter()
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.end(f"{type(error).__name__}: {error}")
        finally:
            self.spent += time.perf_counter() - begun

    return call


class Watch:
    """Records the state of one rank.

    Args:
        folder: Where the ranks write their records.
        every: Optimizer steps between two records, at first.
        compares: Whether rank 0 compares the records.

    Attributes:
        models: The models whose mode is recorded.
        ended: Whether it records nothing more.
        spent: Seconds that it took.
    """

    def __init__(self, folder: Path, every: int = EVERY, *, compares: bool = False) -> None:
        self.folder, self.every, self.compares = folder, max(1, every), compares
        self.models: list[nn.Module] = []
        self.samples = SampleSketch()
        self.owner, self.ended, self.spent = os.getpid(), False, 0.0
        self._begun = time.perf_counter()
        self._file: TextIO | None = None
        self._optimizers: list[Optimizer] = []
        self._steps: list[int] = []
        self._stepping: list[Optimizer] = []
        self._waiting: list[tuple[dict[str, Any], torch.Tensor | None, Any]] = []
        self._comparison: Any = None
        self._averages = False
        self._handles: list[Any] = []

    def install(self) -> None:
        """Begins to watch."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self.samples.install()
        make = DistributedDataParallel.__init__

        def made(model: Any, *args: Any, **kwargs: Any) -> None:
            make(model, *args, **kwargs)
            self.models.append(model)

        DistributedDataParallel.__init__ = made  # type: ignore[method-assign,assignment]
        sys.meta_path.insert(0, AfterImport({_AVERAGERS: self._on_import}))
        os.register_at_fork(after_in_child=self._on_fork)

    def _on_fork(self) -> None:
        # A launcher that forks its ranks has taken no step; the workers of a loader take none.
        self.owner, self.ended = os.getpid(), self.ended or self._file is not None

    def _on_import(self, averagers: Any) -> None:
        make = averagers.ModelAverager.__init__

        def made(averager: Any, *args: Any, **kwargs: Any) -> None:
            # The weights differ between two averages.
            self._averages = True
            make(averager, *args, **kwargs)

        averagers.ModelAverager.__init__ = made

    def close(self) -> None:
        """Ends the watch; a second call does nothing."""
        if not self.ended and os.getpid() == self.owner:
            self.end("")

    def end(self, why: str) -> None:
        """Ends the watch, and says why if that was not asked for."""
        self.ended = True
        for handle in self._handles:
            handle.remove()
        self.samples.remove()
        try:
            self._write_waiting(wait=True)
            if self._file is not None:
                share = self.spent / (time.perf_counter() - self._begun)
                record = {"end": why, "steps": self._steps, "share": share, **self.samples.taken()}
                self._file.write(json.dumps(record) + "\n")
                self._file.close()
            if self._comparison is not None:
                self._comparison.finish()
        except (OSError, ValueError, RuntimeError):
            return  # The run is worth more than its watch.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A step inside that of another optimizer is a part of it: a sharded optimizer has one with its own shard.
        if any(other is optimizer for other in self._stepping):
            # Its last step raised an exception.
            self._stepping.clear()
        self._stepping.append(optimizer)
        if len(self._stepping) == 1:
            self._observe(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping:
            self._stepping.pop()

    @_guarded
    def _observe(self, optimizer: Optimizer) -> None:
        # Before the step: a program that averages the weights after each step has done so.
        if not any(other is optimizer for other in self._optimizers):
            self._optimizers.append(optimizer)
            self._steps.append(0)
        number = next(place for place, other in enumerate(self._optimizers) if other is optimizer)
        self._write_waiting()
        if number == 0:
            self.samples.on_step()
        if self._steps[number] % self.every == 0:
            self._record(number, optimizer)
            if self.spent > _SHARE * (time.perf_counter() - self._begun) and self._steps[number] >= 10 * self.every:
                self.every *= 2
        self._steps[number] += 1

    def _record(self, number: int, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        whole = [parameter for parameter in parameters if is_whole(parameter)]
        trained = [place for place, parameter in enumerate(parameters) if parameter.requires_grad and parameter.is_leaf]
        lost = [place for place in trained if parameters[place].grad is None]
        record: dict[str, Any] = {
            "optimizer": number,
            "step": self._steps[number],
            "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            # Gradients that are cleared within the step are not lost ones.
            "lost": lost if len(lost) < len(parameters) else [],
            "random": generator_digest(),
            "averaged": self._averages,
            **self.samples.taken(),
        }
        if self.models:
            record["eval"] = in_evaluation(self.models)
        if self._steps[number] == 0:
            record["names"] = names_of(parameters, self.models)
            record["wrapped"] = any(isinstance(model, DistributedDataParallel) for model in self.models)
            record["sharded"] = len(whole) < len(parameters)
            record["group"] = group_size(len(whole))
        found = copied = None
        if whole and len({parameter.device for parameter in whole}) == 1:
            found = digests(whole)
            if found.is_cuda:
                # Reading it now would wait for the GPU: it is read in a later step.
                found = found.to("cpu", non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
        self._waiting.append((record, found, copied))
        self._write_waiting()

    def _write_waiting(self, *, wait: bool = False) -> None:
        while self._waiting:
            record, found, copied = self._waiting[0]
            if copied is not None:
                if wait:
                    copied.synchronize()
                elif not copied.query():
                    return
            self._waiting.pop(0)
            if found is not None:
                record["weights"] = found.tolist()
            self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or 0)
            self.folder.mkdir(parents=True, exist_ok=True)
            # At its end, a process of multiprocessing calls the one, and every other process calls the other.
            atexit.register(self.close)
            util.Finalize(None, self.close, exitpriority=100)
            self._file = (self.folder / f"rank{rank}.jsonl").open("w", encoding="utf-8")
            if self.compares and rank == 0:
                from ddp_doctor.watch.comparison import Comparison

                ranks = dist.get_world_size() if dist.is_initialized() else 1
                self._comparison = Comparison(self.folder, _tell, ranks)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._comparison is not None:
            self._comparison.read()


def _tell(finding: Any) -> None:
    warnings.warn(f"ddp-doctor watch: {finding.verdict.value}: {finding.code}: {finding.message}", stacklevel=2)
