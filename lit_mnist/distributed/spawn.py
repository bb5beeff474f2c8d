"""Starts the ranks of this machine by torch.multiprocessing.spawn, the way of most tutorials.

Each rank is a new Python process: it imports again, and gets its work through a pipe. Compare `launch.py`.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import torch.multiprocessing as mp

from lit_mnist.distributed._private import Attempt, end_processes
from lit_mnist.distributed.addresses import stay_on_loopback
from lit_mnist.distributed.launcher import BOARD, Forwarder, Work, first_failure, make_scratch, rank_main
from lit_mnist.distributed.private_folder import PrivateFolder, private_folder, run_id, temporary_files_in
from lit_mnist.distributed.rendezvous import NOWHERE
from lit_mnist.distributed.signals import STOP, blocked, require_main_thread
from lit_mnist.distributed.status_file import StatusFile


def spawn(work: Work, *, world_size: int, logs: Path) -> None:
    """Runs `work` in `world_size` new processes of this machine, and returns when all have ended well.

    Args:
        work: What each rank does; picklable.
        world_size: Number of ranks.
        logs: Folder of the ranks' logs.

    Raises:
        InputError: It is called from another thread than the main one.
        LitMnistError: A rank ended otherwise; the message says which and why.
    """
    require_main_thread()
    stay_on_loopback()
    scratch = make_scratch(logs)
    board = StatusFile(scratch / BOARD, world_size)
    environment = {
        "MASTER_ADDR": str(NOWHERE.master_addr),
        "MASTER_PORT": str(NOWHERE.master_port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        # No rank opens a store, which would listen.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run_id(),
    }
    forward = Forwarder()
    try:
        with private_folder() as private, STOP.taken():
            arguments = (work, logs, scratch / BOARD, private, environment)
            # Blocked, so that no rank meets a signal before it listens.
            with blocked(), temporary_files_in(private.path):
                context = mp.spawn(_start, arguments, nprocs=world_size, join=False)
            while any(process.exitcode is None for process in context.processes):
                if any(process.exitcode for process in context.processes):
                    break
                forward(process.pid for process in context.processes)
                time.sleep(0.05)
            codes = {rank: process.exitcode for rank, process in enumerate(context.processes)}
            if any(codes.values()):
                pids = {rank: process.pid for rank, process in enumerate(context.processes)}
                end_processes(context.processes)
                raise first_failure(Attempt(codes, pids), board)
    finally:
        end_processes(mp.active_children())
        board.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _start(
    local_rank: int, work: Work, logs: Path, board: Path, private: PrivateFolder, environment: dict[str, str]
) -> None:
    os.environ.update(environment, RANK=str(local_rank), LOCAL_RANK=str(local_rank))
    rank_main(work, logs, board, private)
