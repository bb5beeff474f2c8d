"""A network of this machine's own, with a bandwidth and a latency that are chosen: one namespace per rank.

Each namespace has one interface, which is a TUN device. A process reads the packets from all of them, and writes each
one to its destination when a link of this bandwidth and latency would deliver it. The packets are as long as an
interface permits, since the process handles each of them. It requires root and the tool `ip` (iproute2).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lit_mnist.distributed.rank import die_with_parent
from lit_mnist.errors import InputError

INTERFACE = "net0"
_CURRENT = Path("/proc/thread-self/ns/net")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 65_000
_HEADER = 20
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Link:
    """What connects each rank to the switch.

    Attributes:
        gbit_per_s: Bandwidth in each direction.
        latency_ms: Milliseconds from the end of a packet at its sender to the same at its receiver.
    """

    gbit_per_s: float
    latency_ms: float

    @property
    def name(self) -> str:
        """The link in words."""
        return f"{self.gbit_per_s:g} Gbit/s, {self.latency_ms:g} ms"


LINKS = tuple(Link(gbit, latency) for gbit in (1, 10) for latency in (0.1, 1, 10))


@dataclass(frozen=True)
class Network:
    """Namespaces that are connected.

    Attributes:
        namespaces: Their file descriptors.
        forwarder: ID of the process that moves packets between them.
    """

    namespaces: Sequence[int]
    forwarder: int

    def cpu_seconds(self) -> float:
        """Returns how long the forwarder has computed."""
        return int(Path(f"/proc/{self.forwarder}/schedstat").read_text().split()[0]) / 1e9


def address(rank: int) -> str:
    """Returns the address of a rank in its namespace."""
    return f"10.79.0.{rank + 1}"


def enter(namespace: int) -> None:
    """Moves the calling thread, and the threads that it starts, to a namespace.

    Args:
        namespace: The file descriptor of the namespace.

    Raises:
        OSError: The namespace may not be entered.
    """
    _call("setns", namespace, _CLONE_NEWNET)


@contextmanager
def network(ranks: int, link: Link) -> Iterator[Network]:
    """Makes the namespaces and forwards packets between them until the context ends.

    The namespaces have no names. They end with the last process that is in one of them or has its file descriptor.

    Args:
        ranks: Number of namespaces.
        link: Bandwidth and latency of each rank's link.

    Yields:
        The network.

    Raises:
        InputError: The tool `ip` is missing, or this machine does not permit namespaces.
    """
    if shutil.which("ip") is None:
        raise InputError("A network of namespaces takes the tool ip (apt-get install iproute2).")
    with ExitStack() as stack:
        made = [_namespace(rank, stack) for rank in range(ranks)]
        forwarder = os.fork()
        if not forwarder:
            # Nothing of the caller runs in this process, including its exit handlers.
            with suppress(KeyboardInterrupt):
                die_with_parent()
                _forward([device for _, device in made], link)
            os._exit(0)
        try:
            yield Network([namespace for namespace, _ in made], forwarder)
        finally:
            os.kill(forwarder, signal.SIGKILL)
            os.waitpid(forwarder, 0)


def _namespace(rank: int, stack: ExitStack) -> tuple[int, int]:
    """Makes a namespace with its interface; returns their file descriptors, which are open until a stack is closed."""
    before = os.open(_CURRENT, os.O_RDONLY)
    try:
        _call("unshare", _CLONE_NEWNET)
        try:
            namespace = os.open(_CURRENT, os.O_RDONLY)
            stack.callback(os.close, namespace)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, device)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
            _ip("link", "set", "lo", "up")
            _ip("addr", "add", f"{address(rank)}/24", "dev", INTERFACE)
            _ip("link", "set", INTERFACE, "mtu", _MTU, "txqueuelen", 10_000, "up")
        finally:
            enter(before)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        raise InputError(f"A network of namespaces, which takes root, is not possible here: {told.strip()}.") from error
    finally:
        os.close(before)
    return namespace, device


def _call(name: str, *arguments: int) -> None:
    """Calls a function of the C library."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, timeout=20, check=True)


def _forward(devices: Sequence[int], link: Link) -> None:
    """Moves packets between the devices, each at its time, until the process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    # The ranks keep all cores busy: without priority, a packet would wait for them.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ranks = {device: rank for rank, device in enumerate(devices)}
    seconds_per_byte, latency = 8e-9 / link.gbit_per_s, link.latency_ms / 1000
    sends, receives = [0.0] * len(devices), [0.0] * len(devices)
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None
        ready, _, _ = select.select(devices, [], [], timeout)
        now = time.perf_counter()
        for device in ready:
            packet = os.read(device, _MTU + _HEADER)
            # IPv4 only: the last byte of the destination is the number of the rank.
            to = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if not 0 <= to < len(devices):
                continue
            source = ranks[device]
            # A link carries one packet at a time, in each direction.
            end = max(now, sends[source], receives[to]) + len(packet) * seconds_per_byte
            sends[source] = receives[to] = end
            number += 1
            heapq.heappush(waiting, (end + latency, number, to, packet))
        now = time.perf_counter()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            with suppress(BlockingIOError):
                os.write(devices[to], packet)
