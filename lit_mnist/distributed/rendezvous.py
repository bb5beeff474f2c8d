"""Where ranks meet: on one machine in a file that only this user can read, under torchrun in torchrun's own store."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lit_mnist.distributed._private import find_each_other_by
from lit_mnist.distributed.private_folder import own_private_folder, run_id
from lit_mnist.distributed.rank import Rank

# What MASTER_ADDR and MASTER_PORT are where nothing listens: libraries want them to be there.
NOWHERE = RendezvousStoreInfo("127.0.0.1", 0)


class LocalRendezvous(RendezvousHandler):
    """Tells torch's agent that it is alone: the ranks of one machine meet without it, see `use_rendezvous`.

    torch's own handlers open a store that listens on every interface, for any user, and unpickle what they find in it.
    """

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store of the agent: no rank opens one of its own, which would listen."""
        return True

    def get_backend(self) -> str:
        """Returns the handler's name."""
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns a new store of the agent's own, for the first start and for each restart."""
        return RendezvousInfo(HashStore(), 0, 1, NOWHERE)

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
        return run_id()

    def shutdown(self) -> bool:
        """Does nothing: nothing is open."""
        return True


def use_rendezvous(folder: Path) -> None:
    """Lets the ranks of a launch find each other in a file of its private folder; called in each rank.

    It holds for every process group that is made by the environment (`init_method="env://"`, torch's default), by
    whichever library.
    """
    groups = count()

    def meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
        rank = Rank.from_environment()
        # A file for each group: it still holds the addresses of the ranks that met in it before.
        path = folder / f"store-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(groups)}"
        store = FileStore(str(path), rank.world_size)
        store.set_timeout(timeout)
        yield store, rank.rank, rank.world_size

    find_each_other_by(meet)


def rendezvous_store(rank: Rank, timeout: float) -> Store | None:
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
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or own_private_folder():
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
