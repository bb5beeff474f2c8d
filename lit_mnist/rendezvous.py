"""Where the ranks of one machine meet: a store on the loopback interface."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


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
