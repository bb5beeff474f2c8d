"""Where the ranks' connections go: within this machine, or through the interface that reaches the other machines."""

from __future__ import annotations

import os
import platform
import socket
import struct
from contextlib import suppress

from lit_mnist.errors import InputError

_LOOPBACK = "lo" if platform.system() == "Linux" else "lo0"
_SIOCGIFADDR = 0x8915
# A documentation address (RFC 5737): only the way there is looked up, and nothing is sent.
_FAR_AWAY = "192.0.2.1"


def stay_on_loopback() -> None:
    """Keeps the ranks' connections within this machine, unless the user has named an interface.

    Without a name gloo listens on the address that the host's name resolves to, which may be reached from outside.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, _LOOPBACK)


def choose_interface() -> None:
    """Names the network interface for the ranks of several machines, unless the user has named one.

    It is the one through which this machine reaches the meeting point. Without a name gloo listens on the address that
    the host's name resolves to, which often is 127.0.1.1 and reached by no other machine. Where no interface can be
    found, nothing is named.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or platform.system() != "Linux":
        return
    address = _address_for_others()
    if address and (name := _interface_with(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def own_address() -> str:
    """Returns the IPv4 address at which the other ranks reach this one: on one machine a loopback address.

    Raises:
        InputError: There are ranks on other machines, and no address that they could reach.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name and platform.system() == "Linux":
        try:
            return _address_of(name)
        except OSError as error:
            raise InputError(
                f"GLOO_SOCKET_IFNAME names {name}, which has no IPv4 address ({error.strerror}): name another."
            ) from error
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        return "127.0.0.1"
    address = _address_for_others()
    if address is None:
        raise InputError("No interface leads to the other machines: name one in GLOO_SOCKET_IFNAME.")
    return address


def _address_for_others() -> str | None:
    """Returns this machine's address on the way to the meeting point, or else out of it; None where there is none."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    # On the first machine its own name may resolve to loopback, too: then it is the one that leads out of it.
    for target in (master, _FAR_AWAY):
        address = _address_towards(target)
        if address and (not address.startswith("127.") or master.startswith(("127.", "localhost"))):
            return address
    return None


def _address_towards(host: str) -> str | None:
    """Returns this machine's own IPv4 address on the way to a host, or None where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            # Connecting a datagram socket sends nothing.
            way.connect((host, 9))
        except OSError:
            return None
        return str(way.getsockname()[0])


def _interface_with(address: str) -> str | None:
    """Returns the name of the interface that has an IPv4 address, or None (Linux)."""
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            if _address_of(name) == address:
                return name
    return None


def _address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface (Linux).

    Raises:
        OSError: There is no such interface, or it has none.
    """
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    # The address follows the name (16 bytes), the family (2) and the port (2).
    return socket.inet_ntoa(answer[20:24])
