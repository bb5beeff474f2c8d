"""A callback that reports the failed rank, where, with which samples, and how to resume."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.distributed.failure import is_peer_failure
from lit_mnist.distributed.terminal import display_path, print_error
from lit_mnist.plugins.batch_digest import tensors_of
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint

_INDEX_NAMES = ("index", "indices", "idx", "ids")
_MOST_INDICES = 1024


class FailureReport(Callback):
    """Reports the first failed rank on standard error and in `failure.json`.

    The report has the rank, the epoch, step and batch, the samples (their indices if the batch or the sampler tells
    them, otherwise shapes and a SHA-256), the exception, and the command to resume. A rank that only lost its
    connection to another one says so. The error path has no collective, so that it cannot hang:

        trainer = Trainer(callbacks=[FailureReport("runs/mine")])

    Args:
        dirpath: Folder of `failure.json`, which all ranks share.
    """

    def __init__(self, dirpath: str | Path) -> None:
        self.path = Path(dirpath) / "failure.json"
        self._stage, self._batch, self._batch_idx = "", None, -1
        # The epoch of the training in this process, and its first batch, which is not 0 after a resume within an epoch.
        self._epoch = self._first = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Removes the report of an earlier run."""
        self._begin(stage, None, -1)
        self._epoch = -1
        if trainer.is_global_zero:
            self.path.unlink(missing_ok=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remembers the batch."""
        if self._epoch != trainer.current_epoch:
            self._epoch, self._first = trainer.current_epoch, batch_idx
        self._begin("train", batch, batch_idx)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Forgets the batch."""
        self._begin("train", None, self._batch_idx)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Remembers the batch."""
        self._begin("validation", args[0], args[1])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the batch."""
        self._begin("train", None, -1)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Remembers the batch."""
        self._begin("test", args[0], args[1])

    def on_predict_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Remembers the batch."""
        self._begin("predict", args[0], args[1])

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes the report if this rank is the first one; signals and Ctrl-C are not failures."""
        if not isinstance(exception, Exception):
            return
        report = self._report(trainer, exception)
        if self._write(report):
            print_error(_text(report))
        elif report["lost_peer"]:
            place = display_path(self.path)
            print_error(f"Rank {trainer.global_rank} lost its connection to another rank; the cause is in {place}.")

    def _begin(self, stage: str, batch: Any, batch_idx: int) -> None:
        self._stage, self._batch, self._batch_idx = stage, batch, batch_idx

    def _report(self, trainer: Trainer, exception: Exception) -> dict[str, Any]:
        last = next((each.last for each in _callbacks(trainer) if isinstance(each, ExactCheckpoint)), None)
        return {
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "stage": self._stage,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "batch": self._batch_idx if self._batch is not None else None,
            "samples": _samples(trainer, self._stage, self._batch, self._batch_idx, self._first),
            "exception": "".join(traceback.format_exception_only(exception)).strip(),
            "traceback": "".join(traceback.format_exception(exception)),
            "lost_peer": trainer.world_size > 1 and is_peer_failure(exception),
            "command": _command(),
            "checkpoint": str(last) if last else None,
            "time": time.time(),
        }

    def _write(self, report: dict[str, Any]) -> bool:
        """Writes the report unless there is one of an earlier failure, and returns whether to print it."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, prefix=".failure", delete=False) as file:
                json.dump(report, file, indent=2)
            try:
                # Unlike a rename, it fails if another rank was earlier.
                os.link(file.name, self.path)
            except FileExistsError:
                # The loss of a connection is never the cause.
                if report["lost_peer"] or not json.loads(self.path.read_text())["lost_peer"]:
                    return False
                Path(file.name).replace(self.path)
            finally:
                Path(file.name).unlink(missing_ok=True)
        return True


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined]


def _text(report: dict[str, Any]) -> str:
    who = f"Rank {report['rank']} of {report['world_size']} (process {report['pid']} on {report['host']})"
    where = f"in epoch {report['epoch']}, step {report['step']} ({report['stage']}"
    where += ")" if report["batch"] is None else f" batch {report['batch']})"
    if report["lost_peer"]:
        lines = [f"{who} could not continue {where}, since another rank has exited or does not respond."]
    else:
        lines = [f"{who} failed {where}: {report['exception']}"]
    if report["samples"]:
        lines.append(f"Samples: {json.dumps(report['samples'])}")
    lines.append(f"{_advice(report['checkpoint'], report['exception'])}: {report['command']}")
    return "\n".join(lines)


def _advice(checkpoint: str | None, exception: str) -> str:
    if not checkpoint:
        return "To start again"
    if f"{Path(checkpoint).name} is damaged" in exception:
        return f"To resume, pass another checkpoint of {Path(checkpoint).parent} as ckpt_path"
    return f"To resume from {checkpoint}"


def _command() -> str:
    """Returns the command of this run."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"torchrun --nproc-per-node={os.environ['LOCAL_WORLD_SIZE']} {shlex.join(sys.argv)}"
    return shlex.join(sys.orig_argv)


def _samples(trainer: Trainer, stage: str, batch: Any, batch_idx: int, first: int) -> dict[str, Any] | None:
    """Returns the indices of a batch's samples, or what identifies them."""
    if batch is None:
        return None
    # The device may have failed.
    with suppress(Exception):
        indices = _indices_of(batch)
        if indices is None and stage == "train":
            indices = _indices_from_sampler(trainer, batch_idx, first)
        if indices is not None:
            return {"indices": indices[:_MOST_INDICES]}
    tensors = tensors_of(batch)
    found: dict[str, Any] = {"shapes": [list(tensor.shape) for tensor in tensors]}
    with suppress(Exception):
        found["sha256"] = content_sha256(tensors)
    return found


def _indices_of(batch: Any) -> list[int] | None:
    for name in _INDEX_NAMES:
        value = (
            batch.get(name)
            if isinstance(batch, dict)
            else vars(batch).get(name)
            if hasattr(batch, "__dict__")
            else None
        )
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return [int(each) for each in value.reshape(-1).tolist()]
        if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
            return list(value)
    return None


def _indices_from_sampler(trainer: Trainer, batch_idx: int, first: int) -> list[int] | None:
    """Returns the indices from a sampler that gives the same order each time in an epoch.

    After a resume within an epoch, a Trainer counts the batches on. The loader begins with its first batch, unless it
    has a state, which the Trainer or ExactCheckpoint has restored.
    """
    loader = trainer.train_dataloader
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is not BatchSampler or type(sampler.sampler) not in {DistributedSampler, SequentialSampler}:
        return None
    position = batch_idx if hasattr(loader, "load_state_dict") else batch_idx - first
    return list(next(islice(iter(sampler), position, None)))
