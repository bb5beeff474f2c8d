"""Trainings in forked processes that have imported everything: killed at a batch, resumed, and compared."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from processes import Done, forked, run_forked, wait_for

from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.errors import LitMnistError
from lit_mnist.plugins.exact_checkpoint import ExactCheckpoint

TIMEOUT = 60


class SignalAt(Callback):
    """Sends a signal to the last rank before a batch, counted over all epochs from 0."""

    def __init__(self, batch: int, signum: signal.Signals) -> None:
        self.batch, self.signum = batch, signum

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        # `ready` counts this batch already, also after a resume.
        count = trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1
        if count == self.batch and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), self.signum)


@dataclass(frozen=True)
class Training:
    """A training that can be run several times in one folder.

    Attributes:
        make: Makes the module.
        folder: Folder of `last.ckpt` and of the results.
        world_size: Number of ranks.
        every: Optimizer steps between two saves.
        options: Further arguments of the Trainer.
        callbacks: Makes further callbacks.
        data: Makes a data module, if the module has no dataloaders.
        strategy: The strategy of several ranks.
    """

    make: Callable[[], pl.LightningModule]
    folder: Path
    world_size: int = 1
    every: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    data: Callable[[], Any] | None = None
    strategy: Any = "ddp_find_unused_parameters_true"

    def run(self, *, stop: SignalAt | None = None, **options: Any) -> Done:
        """Runs or resumes the training, and returns the exit code of its first rank that failed."""
        self.folder.mkdir(exist_ok=True)

        def work() -> int:
            return self._ranks(stop, options)

        if stop is None or stop.signum != signal.SIGKILL:
            return run_forked(work, self.folder, TIMEOUT)
        # The dataloader workers of a killed rank notice it after some seconds; `forked` ends them.
        with forked(work, self.folder) as child:
            status = wait_for(lambda: _status(child), TIMEOUT, self.folder)
        return Done(os.waitstatus_to_exitcode(status[0]), "", (self.folder / "stderr.txt").read_text())

    def results(self) -> list[Any]:
        """Returns the results of the ranks, which a run that has ended leaves, and removes them."""
        paths = [self.folder / f"result-{rank}.json" for rank in range(self.world_size)]
        found = [json.loads(path.read_text()) for path in paths]
        for path in paths:
            path.unlink()
        return found

    def complete(self, **options: Any) -> list[Any]:
        """Runs or resumes the training to its end, and returns the results."""
        done = self.run(**options)
        assert done.code == 0, done.out + done.err
        return self.results()

    def _ranks(self, stop: SignalAt | None, options: dict[str, Any]) -> int:
        if self.world_size == 1:
            return self._rank(stop, options)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = {}
        for rank in range(self.world_size):
            pid = os.fork()
            if not pid:
                os.environ.update(
                    LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(self.world_size),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                )  # fmt: skip
                code = 99
                try:
                    code = self._rank(stop, options)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            ranks[pid] = rank
        first = 0
        while ranks:
            pid, status = os.wait()
            del ranks[pid]
            code = os.waitstatus_to_exitcode(status)
            # The rank that lost a killed one may be waited for first.
            first = code if code < 0 <= first else first or code
            if code < 0:
                # A launcher kills the other ranks.
                for other in ranks:
                    with suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
        # As a shell does.
        return 128 - first if first < 0 else first

    def _rank(self, stop: SignalAt | None, options: dict[str, Any]) -> int:
        # In here, since pytest resets the filters.
        warnings.filterwarnings("ignore", module="lightning")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        try:
            self._fit(stop, options)
        except LitMnistError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except SystemExit as error:
            return int(error.code or 0)
        except Exception:
            traceback.print_exc()
            return 1
        return 0

    def _fit(self, stop: SignalAt | None, options: dict[str, Any]) -> None:
        pl.seed_everything(1, verbose=False)
        module = self.make()
        exact = ExactCheckpoint(self.folder, self.every)
        settings = {"max_epochs": 3, "num_sanity_val_steps": 1, **self.options, **options}
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=self.world_size,
            strategy=self.strategy if self.world_size > 1 else "auto",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*self.callbacks(), exact, *([stop] if stop else [])],
            **settings,
        )
        trainer.fit(module, datamodule=self.data() if self.data else None, ckpt_path=exact.last)
        result = result_of(trainer, module)
        (self.folder / f"result-{trainer.global_rank}.json").write_text(json.dumps(result))
        if self.world_size > 1:
            dist.barrier()


def result_of(trainer: Any, module: Any, metrics: Collection[str] | None = None) -> dict[str, Any]:
    """Returns what equal trainings have in common; by default with all metrics."""
    logged = trainer.callback_metrics.items()
    return {
        "weights": content_sha256(dict(module.state_dict())),
        "optimizers": [content_sha256(_plain(each.state_dict())) for each in trainer.optimizers],
        "metrics": {name: float(value) for name, value in logged if metrics is None or name in metrics},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def _status(child: int) -> list[int]:
    found, status = os.waitpid(child, os.WNOHANG)
    return [status] if found else []


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return [[str(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def assert_resumes(training: Training, reference: list[Any], kills: list[int], *, alone: bool = False) -> None:
    """Kills a training at each of some batches, resumes it, and compares its end with the uninterrupted one.

    Args:
        training: The training.
        reference: The results of the uninterrupted one.
        kills: The batches, in ascending order. Each kill is of the training that was resumed after the one before.
        alone: Whether each kill has a training of its own, which takes the longer the more kills there are.
    """
    for part in [[batch] for batch in kills] if alone else [kills]:
        for path in training.folder.glob("*"):
            path.unlink()
        for batch in part:
            done = training.run(stop=SignalAt(batch, signal.SIGKILL))
            assert done.code in {-signal.SIGKILL, 128 + signal.SIGKILL}, f"{batch}: {done.code} {done.out}{done.err}"
        assert training.complete() == reference, f"killed at {part}"
