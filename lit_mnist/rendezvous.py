"""Where ranks meet: on one machine in a store on the loopback interface, under torchrun in torchrun's own store."""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta

from torch.distributed import DistStoreError, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lit_mnist.ranks import Rank

_OWN = "lit_mnist-"


class LoopbackRendezvous(RendezvousHandler):
    """Brings the ranks of one machine together through a store that listens on the loopback interface only.

    torch's own handlers listen on every interface, and a store unpickles what it is sent. The socket is bound before
    the store takes it, so that no other program can take its port in between.

    Args:
        run_id: Name of the run.
        timeout: Seconds that a rank waits for a key of the store.
    """

    def __init__(self, run_id: str, timeout: float) -> None:
        self._run_id = run_id
        self._timeout = timedelta(seconds=timeout)
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store that the agent has opened."""
        return True

    def get_backend(self) -> str:
        """Returns the handler's name."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens a new store, for the first start and for each restart."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        """Returns whether no rank may join any more."""
        return False

    def set_closed(self) -> None:
        """Does nothing: the store ends with this process."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: there is one machine."""
        return 0

    def get_run_id(self) -> str:
        """Returns the run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Closes the store."""
        self._store = None
        return True


def run_id() -> str:
    """Returns the name of a launch by this process."""
    return f"{_OWN}{os.getpid()}"


def meeting_point(rank: Rank, timeout: float) -> Store | None:
    """Returns the store to make a process group with, or None where torch finds a fresh one by the environment.

    A lone rank has one to itself. torchrun keeps one store over all its restarts: it still holds the addresses of
    ranks that are gone, so that each start needs a part of it that no start before it had. The ranks agree on it here:
    each calls out a name of its own, rank 0 answers every name that it hears, and ends when all have heard it.

    Args:
        rank: This rank.
        timeout: Seconds to wait for the others.

    Raises:
        DistStoreError: A rank has not come in time.
    """
    if rank.world_size == 1:
        return HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ["TORCHELASTIC_RUN_ID"].startswith(_OWN):
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    meeting = PrefixStore("lit_mnist/meeting", store)
    name = uuid.uuid4().hex
    if rank.is_first:
        _welcome(meeting, name, rank.world_size, timeout)
        return PrefixStore(f"lit_mnist/{name}", store)
    meeting.set(f"call/{rank.rank}", name)
    start = meeting.get(f"answer/{name}").decode()
    meeting.set(f"heard/{start}/{rank.rank}", "")
    return PrefixStore(f"lit_mnist/{start}", store)


def _welcome(meeting: Store, start: str, world_size: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    others = range(1, world_size)
    while not meeting.check([f"heard/{start}/{other}" for other in others]):
        for other in others:
            if meeting.check([f"call/{other}"]):
                meeting.set(f"answer/{meeting.get(f'call/{other}').decode()}", start)
        if time.monotonic() > deadline:
            raise DistStoreError(f"not all of {world_size} ranks have come within {timeout:.0f} s")
        time.sleep(0.02)
