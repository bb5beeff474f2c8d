"""The ways to initialize a process group. Each one creates a real process group with its own timeout.

Every rank needs its number, the number of ranks, and a store with the addresses of all ranks. The ways differ in the
store only. `init_method="tcp://HOST:PORT"` is not shown: its store listens on every interface of the machine, and
unpickles what it receives.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from examples.collectives.group import on_first
from examples.collectives.torch_internals import timeout_in_force
from lit_mnist.distributed.rank import Rank


@dataclass(frozen=True)
class Way:
    """One way to initialize a process group.

    Attributes:
        name: Its name.
        call: Its code.
        explanation: How the ranks find each other, in one sentence.
        seconds: The timeout that it sets.
        start: Initializes the group in this rank, with a folder that all ranks share.
    """

    name: str
    call: str
    explanation: str
    seconds: int
    start: Callable[[Rank, timedelta, Path], None]


def _by_environment(rank: Rank, timeout: timedelta, folder: Path) -> None:
    dist.init_process_group("gloo", init_method="env://", timeout=timeout)


def _by_file(rank: Rank, timeout: timedelta, folder: Path) -> None:
    store = dist.FileStore(str(folder / "meeting"), rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout)


def _by_tcp_store(rank: Rank, timeout: timedelta, folder: Path) -> None:
    note = dist.FileStore(str(folder / "port"), rank.world_size)
    note.set_timeout(timeout)
    listener = None
    if rank.is_first:
        # Bound in advance to loopback, so that no other program can take the port.
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        note.set("port", str(listener.getsockname()[1]))
    store = dist.TCPStore(
        "127.0.0.1",
        int(note.get("port")),
        is_master=rank.is_first,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size, timeout=timeout)


WAYS = (
    Way(
        "environment",
        'dist.init_process_group("gloo", init_method="env://", timeout=...)',
        "The launcher has written RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: what torchrun and Lightning use.",
        10,
        _by_environment,
    ),
    Way(
        "file",
        'dist.init_process_group("gloo", store=FileStore(path, N), rank=r, world_size=N, timeout=...)',
        "All ranks see one file, which must be new each time (short form: init_method=file://path); no port is needed.",
        15,
        _by_file,
    ),
    Way(
        "TCP store",
        'dist.init_process_group("gloo", store=TCPStore(host, port, ...), rank=r, world_size=N, timeout=...)',
        "Rank 0 serves the store on a loopback socket that it has bound itself, and the others are told its port.",
        20,
        _by_tcp_store,
    ),
)


def show_ways(folder: Path, rank: Rank) -> None:
    """Creates a group in each way and checks an all-reduce in it; rank 0 prints the results.

    Args:
        folder: An empty folder that all ranks share.
        rank: This rank.

    Raises:
        RuntimeError: An all-reduce gave a wrong sum.
    """
    if rank.is_first:
        print("\n\n2. The ways to initialize a process group")
        print("   By default gloo waits 30 minutes for a missing rank: set a timeout.")
    for way in WAYS:
        way.start(rank, timedelta(seconds=way.seconds), folder)
        tensor = torch.tensor([rank.rank + 1])
        dist.all_reduce(tensor)
        found = on_first(rank, (int(tensor.item()), timeout_in_force()))
        dist.destroy_process_group()
        if rank.is_first:
            _show(way, found)


def _show(way: Way, found: list[tuple[int, float]]) -> None:
    expected = sum(range(1, len(found) + 1))
    if any(total != expected for total, _ in found):
        raise RuntimeError(f"{way.name}: the ranks' sums are {[total for total, _ in found]} instead of {expected}")
    terms = " + ".join(str(number) for number in range(1, len(found) + 1))
    timeouts = ", ".join(f"{seconds:g} s" for seconds in sorted({seconds for _, seconds in found}))
    print(f"\n{way.name:<16}{way.call}\n  {way.explanation}")
    print(f"  all-reduce {terms} = {expected} on all {len(found)} ranks, timeout {timeouts}", flush=True)
