"""The watch in a rank: what it records every few optimizer steps."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from multiprocessing import util
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ddp_doctor.findings import Finding
from ddp_doctor.probes.wrap import before, wrap
from ddp_doctor.torch_internals import on_indices
from ddp_doctor.watch.comparison import Comparison, said
from ddp_doctor.watch.samples import Epoch, Samples

EVERY = 10
# Share of the run's time that the watch may take: the distance between records doubles while it takes more.
_SHARE = 0.01
# Numbers of a record for the weights.
MOST_GROUPS = 256
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    found.models += [] if model is None else [model]
    found.install()
    return found


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an error end the watch, not the run."""

    @wraps(method)
    def call(self: Watch, *args: Any) -> Any:
        if self.ended or os.getpid() != self.owner:
            return None
        begun = time.perf_counter()
        try:
            return method(self, *args)
        except Exception as error:
            return self.end(f"{type(error).__name__}: {error}")
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
        owner: The process that is watched.
        ended: Whether it records nothing more.
        spent: Seconds that it took.
    """

    def __init__(self, folder: Path, every: int = EVERY, *, compares: bool = False) -> None:
        self.folder, self.every, self.compares = folder, max(1, every), compares
        self.models: list[nn.Module] = []
        self.owner, self.ended, self.spent = os.getpid(), False, 0.0
        self._samples = Samples()
        self._begun = time.perf_counter()
        self._file: TextIO | None = None
        self._steps: dict[Optimizer, int] = {}
        self._stepping: list[Optimizer] = []
        self._waiting: tuple[dict[str, Any], torch.Tensor, torch.cuda.Event] | None = None
        self._comparison: Comparison | None = None
        self._averages = False

    def install(self) -> None:
        """Begins to watch."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        wrap(DistributedDataParallel, "__init__", self._on_ddp)
        before(ModelAverager, "__init__", self._on_averager)
        wrap(DataLoader, "__iter__", self._on_loader)
        on_indices(self._on_indices, self._samples.on_batch)
        os.register_at_fork(after_in_child=self._on_fork)

    def _on_fork(self) -> None:
        # A launcher that forks its ranks has taken no step; the workers of a loader take none.
        self.owner, self.ended = os.getpid(), self.ended or self._file is not None

    def _on_ddp(self, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        self.models.append(model)

    def _on_averager(self, *_: Any, **__: Any) -> None:
        # The weights differ between two averages.
        self._averages = True

    def _on_loader(self, original: Callable[..., Any], loader: Any) -> Any:
        epoch: Epoch | None = self._begin_epoch(loader)
        try:
            # Workers get their first batches before the iterator is returned.
            iterator = original(loader)
        finally:
            self._samples.beginning = None
        iterator.watch_epoch = epoch
        return iterator

    @_guarded
    def _begin_epoch(self, loader: Any) -> Epoch:
        return self._samples.begin(loader)

    @_guarded
    def _on_indices(self, iterator: Any, indices: list[int]) -> None:
        self._samples.on_indices(iterator, indices)

    def close(self) -> None:
        """Ends the watch; a second call does nothing."""
        if not self.ended and os.getpid() == self.owner:
            self.end("")

    def end(self, why: str) -> None:
        """Ends the watch, and says why if that was not asked for."""
        self.ended = True
        try:
            self._write_waiting()
            if self._file is not None:
                share = self.spent / (time.perf_counter() - self._begun)
                self._write({"end": why, "steps": [*self._steps.values()], "share": share, **self._samples.taken()})
                self._file.close()
            if self._comparison is not None:
                self._comparison.finish()
        except (OSError, ValueError, RuntimeError):
            return  # The run is worth more than its watch.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A step inside that of another optimizer is a part of it: a sharded optimizer has one with its own shard.
        if optimizer in self._stepping:
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
        step = self._steps.setdefault(optimizer, 0)
        number = list(self._steps).index(optimizer)
        if number == 0:
            self._samples.on_step()
        if step % self.every == 0:
            self._record(optimizer, number, step)
            if self.spent > _SHARE * (time.perf_counter() - self._begun) and step >= 10 * self.every:
                self.every *= 2
        self._steps[optimizer] += 1

    def _record(self, optimizer: Optimizer, number: int, step: int) -> None:
        self._write_waiting()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        whole = [parameter for parameter in parameters if is_whole(parameter)]
        trained = [place for place, parameter in enumerate(parameters) if parameter.requires_grad and parameter.is_leaf]
        lost = [place for place in trained if parameters[place].grad is None]
        record: dict[str, Any] = {
            "optimizer": number,
            "step": step,
            "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            # Gradients that are cleared within the step are not lost ones.
            "lost": lost if len(lost) < len(parameters) else [],
            "random": _generators(),
            "averaged": self._averages,
            "eval": any(not any(module.training for module in model.modules()) for model in self.models),
            **self._samples.taken(),
        }
        if step == 0:
            models = [model.named_parameters() for model in self.models]
            names = {id(parameter): name.removeprefix("module.") for model in models for name, parameter in model}
            record["names"] = [names.get(id(parameter), f"parameter {n}") for n, parameter in enumerate(parameters)]
            record["wrapped"] = any(isinstance(model, DistributedDataParallel) for model in self.models)
            record["sharded"] = len(whole) < len(parameters)
            record["group"] = group_size(len(whole))
        if not whole or len({parameter.device for parameter in whole}) > 1:
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
            self.folder.mkdir(parents=True, exist_ok=True)
            # At its end, a process of multiprocessing calls the one, and every other process calls the other.
            atexit.register(self.close)
            util.Finalize(None, self.close, exitpriority=100)
            self._file = (self.folder / f"rank{rank}.jsonl").open("w", encoding="utf-8")
            if self.compares and rank == 0:
                ranks = dist.get_world_size() if dist.is_initialized() else 1
                self._comparison = Comparison(self.folder, _warn, ranks)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._comparison is not None and not self.ended:
            self._comparison.read()


def _warn(finding: Finding) -> None:
    warnings.warn(said(finding), stacklevel=2)


def is_whole(tensor: torch.Tensor) -> bool:
    """Returns whether this rank holds the tensor itself, not a shard of it (a DTensor) or a tensor without values."""
    plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and not tensor.is_sparse and not tensor.is_quantized
    return plain and tensor.device.type != "meta"


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns an int64 tensor of shape (groups,) on the device of the tensors: sums of the bits of neighbours.

    They are equal if and, but for chance, only if the tensors are, at the cost of reading them once.

    Args:
        tensors: At least one tensor; all on one device.
    """
    values = [tensor.detach() for tensor in tensors]
    plain = [torch.view_as_real(value) if value.is_complex() else value for value in values]
    sums = torch.stack([value.view(_SAME_SIZE[value.element_size()]).sum(dtype=torch.int64) for value in plain])
    size = group_size(len(sums))
    places = torch.arange(len(sums), device=sums.device)
    groups = torch.zeros(-(-len(sums) // size), dtype=torch.int64, device=sums.device)
    # Odd factors: two tensors that were exchanged give another sum.
    return groups.index_add(0, places // size, sums * (2 * places + 1))


def group_size(tensors: int) -> int:
    """Returns how many neighbours share a digest."""
    return max(1, -(-tensors // MOST_GROUPS))


def _generators() -> str:
    """Returns a digest of the states of torch's generators of the CPU and of the current GPU."""
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():
        state.update(torch.cuda.get_rng_state().numpy().tobytes())
    return state.hexdigest()[:16]
