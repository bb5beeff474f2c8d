"""Which rank failed, and in which step."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lit_mnist.errors import InputError, NonFiniteError, StoppedError

# Names the file of `RankStatus` to the ranks that a launcher has started.
STATUS_VARIABLE = "LIT_MNIST_RANK_STATUS"


class Status(NamedTuple):
    """What a rank has last written: its process ID, its optimizer step, counted from 1, and when it began it."""

    pid: int
    step: int
    time: float


class RankStatus:
    """The step of each rank of a machine, in a file that survives the death of a rank.

    Args:
        path: The file, which the ranks share.
        world_size: Number of ranks.
    """

    def __init__(self, path: Path, world_size: int) -> None:
        path.touch()
        size = world_size * 3 * 8
        if path.stat().st_size < size:
            os.truncate(path, size)
        self._rows = np.memmap(path, np.float64, "r+", shape=(world_size, 3))

    def update(self, rank: int, step: int) -> None:
        """Records that a rank has begun a step; it takes a microsecond."""
        self._rows[rank] = os.getpid(), step, time.time()

    def of(self, rank: int) -> Status:
        """Returns what a rank has last written; zeros before that."""
        pid, step, when = self._rows[rank].tolist()
        return Status(int(pid), int(step), when)


class FailureReport(Callback):
    """Names the rank, the process and the step when a training fails.

    Of several ranks, the first traceback on the terminal is often that of a rank that only lost its peer. This callback
    prints one line for each rank, and tells which peer has ended:

        trainer = Trainer(callbacks=[FailureReport("runs/mine")])

    Args:
        folder: Folder of the file in which the ranks of this machine record their steps. By default, the file is that
            of the launcher, or in the Trainer's `default_root_dir`.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._status: RankStatus | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the file."""
        path = Path(self.folder or trainer.default_root_dir) / ".ranks"
        if self.folder is None and STATUS_VARIABLE in os.environ:
            path = Path(os.environ[STATUS_VARIABLE])
        path.parent.mkdir(parents=True, exist_ok=True)
        self._status = RankStatus(path, trainer.world_size)
        # The file may be of a run that has crashed.
        self._status.update(trainer.global_rank, trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Records the step."""
        assert self._status
        self._status.update(trainer.global_rank, trainer.global_step + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Removes the file that this callback has made."""
        if STATUS_VARIABLE not in os.environ and trainer.is_global_zero:
            (Path(self.folder or trainer.default_root_dir) / ".ranks").unlink(missing_ok=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Prints the line, except for errors that say all by themselves."""
        if isinstance(exception, InputError | NonFiniteError | StoppedError) or self._status is None:
            return
        here = f"rank {trainer.global_rank} (process {os.getpid()} on {socket.gethostname()})"
        lost = []
        for rank in range(trainer.world_size):
            peer = self._status.of(rank)
            is_here = rank // trainer.num_devices == trainer.node_rank
            if rank != trainer.global_rank and is_here and peer.pid and not Path(f"/proc/{peer.pid}").exists():
                lost.append(f"rank {rank} (process {peer.pid}), which ended in step {peer.step}")
        what = f"lost {', '.join(lost)}" if lost else f"failed: {type(exception).__name__}: {exception}"
        print(f"{here}, step {trainer.global_step + 1}: {what}", file=sys.stderr, flush=True)
