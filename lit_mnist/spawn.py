"""Starts the ranks of this machine by torch.multiprocessing.spawn, the way of most tutorials.

Each rank is a new Python process: it imports again, and gets its work through a pipe. Compare `launch.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch.multiprocessing as mp

from lit_mnist.addresses import stay_on_loopback
from lit_mnist.board import Board
from lit_mnist.launch import BOARD, Forwarder, Work, first_failure, make_scratch, rank_main
from lit_mnist.private import enter_private_folder, private_folder, temporary_files_in
from lit_mnist.rendezvous import LoopbackRendezvous, run_id
from lit_mnist.seams import Attempt, end_processes
from lit_mnist.stop import STOP, blocked


def spawn(work: Work, *, world_size: int, timeout: float, logs: Path) -> None:
    """Runs `work` in `world_size` new processes of this machine, and returns when all have ended well.

    Args:
        work: What each rank does; picklable.
        world_size: Number of ranks.
        timeout: Seconds that a rank waits for the others at the start.
        logs: Folder of the ranks' logs.

    Raises:
        LitMnistError: A rank ended otherwise; the message says which and why.
    """
    stay_on_loopback()
    rendezvous = LoopbackRendezvous(run_id(), timeout)
    meeting = rendezvous.next_rendezvous().bootstrap_store_info
    assert meeting is not None
    scratch = make_scratch(logs)
    board = Board(scratch / BOARD, world_size)
    environment = {
        "MASTER_ADDR": str(meeting.master_addr),
        "MASTER_PORT": str(meeting.master_port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        # The store is this process's: the ranks are to connect to it, and not to open one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": run_id(),
    }
    forward = Forwarder()
    try:
        with private_folder() as private, STOP.taken():
            arguments = (work, logs, scratch, private, tempfile.gettempdir(), environment, os.getpid())
            # Blocked, so that no rank meets a signal before it listens.
            with blocked(), temporary_files_in(private):
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
        rendezvous.shutdown()
        board.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _start(
    local_rank: int,
    work: Work,
    logs: Path,
    scratch: Path,
    private: Path,
    temporary: str,
    environment: dict[str, str],
    launcher: int,
) -> None:
    os.environ.update(environment, RANK=str(local_rank), LOCAL_RANK=str(local_rank))
    enter_private_folder(private, temporary)
    rank_main(work, logs, scratch / BOARD, launcher)
