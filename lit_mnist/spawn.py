"""Starts the ranks of this machine by torch.multiprocessing.spawn, the way of most tutorials.

Each rank is a new Python process: it imports again, and gets its work through a pipe. Compare `launch.py`.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from lit_mnist.launch import ERROR_FILE, Work, first_failure, raise_on, rank_main, read_report
from lit_mnist.ranks import stay_on_loopback
from lit_mnist.rendezvous import LoopbackRendezvous

_SECONDS_TO_END = 1


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
    raise_on(signal.SIGTERM, signal.SIGINT)
    # What it tells of a failure is told here, once and in the user's terms.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    rendezvous = LoopbackRendezvous(f"lit_mnist-{os.getpid()}", timeout)
    meeting = rendezvous.next_rendezvous().bootstrap_store_info
    assert meeting is not None
    scratch = Path(tempfile.mkdtemp(prefix="lit_mnist-"))
    environment = {
        "MASTER_ADDR": str(meeting.master_addr),
        "MASTER_PORT": str(meeting.master_port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        # The store is this process's: the ranks are to connect to it, and not to open one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    context = None
    try:
        context = mp.spawn(_start, (work, logs, scratch, environment), nprocs=world_size, join=False)
        while not context.join(timeout=0.1, grace_period=_SECONDS_TO_END):
            pass
    except ProcessException as error:
        codes = {rank: process.exitcode for rank, process in enumerate(context.processes if context else [])}
        reports = {rank: read_report(scratch / f"{rank}.json") for rank in codes}
        raise first_failure(codes, reports, first=error.error_index).as_error() from error
    finally:
        for process in mp.active_children():
            with suppress(ProcessLookupError):
                process.kill()
            process.join()
        rendezvous.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def _start(local_rank: int, work: Work, logs: Path, scratch: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment, RANK=str(local_rank), LOCAL_RANK=str(local_rank))
    os.environ[ERROR_FILE] = str(scratch / f"{local_rank}.json")
    rank_main(work, logs)
