"""The rendezvous of the ranks: the store through which they find each other, and the network interface that they use.

On one machine the store is a file that only this user can read. Under torchrun it is torchrun's store.
"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, FileStore, HashStore, PrefixStore, Store, TCPStore

from lit_mnist.distributed.private_folder import launch_private_folder
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.torch_internals import AGENT_STORE, set_env_rendezvous

_LOOPBACK = "lo" if platform.system() == "Linux" else "lo0"
_SIOCGIFADDR = 0x8915
# An address for documentation (RFC 5737): the kernel only looks up the route, and nothing is sent.
_REMOTE_ADDRESS = "192.0.2.1"


def use_file_rendezvous(folder: Path) -> None:
    """Replaces the rendezvous of `init_method="env://"` (torch's default) by a file in the launch's private folder."""
    groups = count()

    def handler(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
        rank = Rank.from_environment()
        # One file per group, since the addresses of an earlier group stay in its file.
        path = folder / f"store-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(groups)}"
        store = FileStore(str(path), rank.world_size)
        store.set_timeout(timeout)
        yield store, rank.rank, rank.world_size

    set_env_rendezvous(handler)


def rendezvous_store(rank: Rank, timeout: float) -> Store | None:
    """Returns the store for a process group, or None if torch can create one from the environment.

    torchrun keeps one store over all restarts, which still holds the addresses of exited ranks. Each start therefore
    needs a new prefix, on which the ranks agree here: each rank sends a random name, rank 0 answers every name with the
    prefix, and all ranks acknowledge it.

    Args:
        rank: This rank.
        timeout: Seconds to wait for the other ranks.

    Raises:
        DistStoreError: A rank has not joined in time.
    """
    if rank.world_size == 1:
        return HashStore()
    if os.environ.get(AGENT_STORE) != "True" or launch_private_folder():
        return None
    store = connect_to_master(timeout)
    messages = PrefixStore("lit_mnist/meeting", store)
    name = uuid.uuid4().hex
    if rank.is_first:
        _answer_ranks(messages, name, rank.world_size, timeout)
        return PrefixStore(f"lit_mnist/{name}", store)
    messages.set(f"name/{rank.rank}", name)
    start = messages.get(f"answer/{name}").decode()
    messages.set(f"acknowledged/{start}/{rank.rank}", "")
    return PrefixStore(f"lit_mnist/{start}", store)


def connect_to_master(timeout: float) -> TCPStore:
    """Returns a client of the store at MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def _answer_ranks(messages: Store, start: str, world_size: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    others = range(1, world_size)
    while not messages.check([f"acknowledged/{start}/{other}" for other in others]):
        for other in others:
            if messages.check([f"name/{other}"]):
                messages.set(f"answer/{messages.get(f'name/{other}').decode()}", start)
        if time.monotonic() > deadline:
            raise DistStoreError(f"not all of {world_size} ranks have joined within {timeout:.0f} s")
        time.sleep(0.02)


def use_loopback() -> None:
    """Selects the loopback interface for the ranks of one machine, unless the user has selected one.

    By default gloo listens on the address that the host name resolves to, which other machines may reach.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, _LOOPBACK)


def choose_interface() -> None:
    """Selects the interface that leads to MASTER_ADDR, unless the user has selected one.

    By default gloo listens on the address that the host name resolves to, which is often 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or platform.system() != "Linux":
        return
    address = _external_address()
    if address and (name := _interface_with(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _external_address() -> str | None:
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    # On the master itself, its name may resolve to loopback: then use the route to any remote address.
    for target in (master, _REMOTE_ADDRESS):
        address = _address_towards(target)
        if address and (not address.startswith("127.") or master.startswith(("127.", "localhost"))):
            return address
    return None


def _address_towards(host: str) -> str | None:
    """Returns this machine's IPv4 address on the route to a host, or None if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        try:
            # Connecting a datagram socket sends nothing.
            datagrams.connect((host, 9))
        except OSError:
            return None
        return str(datagrams.getsockname()[0])


def _interface_with(address: str) -> str | None:
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            if _address_of(name) == address:
                return name
    return None


def _address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface; raises an OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        answer = fcntl.ioctl(datagrams, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    # The address follows the name (16 bytes), the family (2) and the port (2).
    return socket.inet_ntoa(answer[20:24])
