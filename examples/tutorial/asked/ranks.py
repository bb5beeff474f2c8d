"""Two ranks for the questions: each one says a line, and the program prints both."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank


def on_two_ranks(name: str, work: Callable[[int], str], seconds: float = 60) -> None:
    """Runs `work` with the number of the rank on two ranks, and prints what each of them returns.

    Args:
        name: The first words of the lines.
        work: The work of a rank, which has joined a process group.
        seconds: The timeout of the group.
    """
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    # DDP imports it, which takes seconds: here once, and not on each rank within the timeout.
    importlib.import_module("torch._dynamo")
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder)
        launch(partial(_run, work, said, seconds), world_size=2, max_restarts=0, logs=said / "logs")
        for rank in range(2):
            print(f"{name}, rank {rank}: {(said / str(rank)).read_text()}", flush=True)


def _run(work: Callable[[int], str], said: Path, seconds: float, rank: Rank) -> None:
    # Both ranks have started before a short timeout begins.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    (said / str(rank.rank)).write_text(work(rank.rank))
