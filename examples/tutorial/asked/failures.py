"""Questions about runs that hang, fail or lose files.

python -m examples.tutorial.asked.failures signal|uneven|timeout|save|port
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from examples.tutorial.asked.ranks import on_two_ranks


def stopped() -> None:
    """After which step does each rank stop, if rank 0 alone gets a SIGTERM in step 2?"""

    def train(rank: int, agree: bool) -> str:
        received = torch.tensor(0)
        signal.signal(signal.SIGTERM, lambda *_: received.fill_(1))
        for step in range(5):
            if rank == 0 and step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                dist.all_reduce(torch.ones(1000))
            except RuntimeError:
                return f"fails in step {step}"
            if agree:
                dist.all_reduce(received, op=dist.ReduceOp.MAX)
            if received:
                return f"stops after step {step}"
        return "is done"

    on_two_ranks("each for itself", lambda rank: train(rank, agree=False), seconds=2)
    on_two_ranks("together", lambda rank: train(rank, agree=True))


def uneven() -> None:
    """What happens with three batches on rank 0, and two on rank 1?"""

    def train(rank: int, join: bool) -> str:
        model, step = DistributedDataParallel(nn.Linear(4, 2)), 0
        with Join([model]) if join else contextlib.nullcontext():
            try:
                for _ in range(3 - rank):
                    model(torch.ones(1, 4)).sum().backward()
                    step += 1
            except RuntimeError:
                return f"fails after {step} batches"
        return f"{step} batches"

    on_two_ranks("without Join", lambda rank: train(rank, join=False), seconds=2)
    on_two_ranks("with Join", lambda rank: train(rank, join=True))


def timeout() -> None:
    """How long does rank 1 wait while rank 0 evaluates alone for two seconds?"""

    def evaluate(rank: int) -> str:
        dist.barrier()
        begin = time.monotonic()
        if rank == 0:
            time.sleep(2)
            return "evaluates alone for 2 s"
        try:
            dist.broadcast(torch.ones(1), src=0)
        except RuntimeError:
            return f"fails after {time.monotonic() - begin:.0f} s"
        return "continues"

    def patient(rank: int) -> str:
        told = evaluate(rank)
        if rank == 0:
            dist.broadcast(torch.ones(1), src=0)
        return told

    on_two_ranks("timeout of 1 s", evaluate, seconds=1)
    on_two_ranks("timeout of 60 s", patient)


def save() -> None:
    """What does rank 0 read back from the file that rank 1 also writes?"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"

        def write(rank: int, only_first: bool) -> str:
            if rank == 0:
                torch.save({"weights": torch.ones(1000)}, path)
            dist.barrier()
            # `torch.save` begins like this on the other rank, too: it empties the file.
            other = None if rank == 0 or only_first else path.open("wb")
            dist.barrier()
            try:
                return f"reads {len(torch.load(path)['weights'])} weights"
            except (EOFError, RuntimeError) as error:
                return f"{type(error).__name__}, the file has {path.stat().st_size} bytes"
            finally:
                dist.barrier()
                if other:
                    other.close()

        on_two_ranks("all save", lambda rank: write(rank, only_first=False))
        on_two_ranks("rank 0 saves", lambda rank: write(rank, only_first=True))


def port() -> None:
    """What happens if a second run on this machine uses the port of the first?"""
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        dist.TCPStore("127.0.0.1", first.port, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError as error:
        print("the same port:", str(error).rpartition("name: ")[2])
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print("port 0, a free one:", other.port != first.port)


if __name__ == "__main__":
    questions = {"signal": stopped, "uneven": uneven, "timeout": timeout, "save": save, "port": port}
    questions[sys.argv[1]]()
