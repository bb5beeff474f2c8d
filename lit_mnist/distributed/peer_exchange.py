"""The peer exchange: fast collectives of a few kilobytes on the CPU, for use in the middle of a step.

gloo runs collectives in separate threads: on two busy cores an all-reduce of 100 bytes takes one to two milliseconds.
On one machine, the ranks exchange them instead through Unix sockets in the calling thread, which takes about 50
microseconds. The sockets are in folders that other users cannot enter. Ranks on several machines use gloo.
"""

from __future__ import annotations

import socket
import struct
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.private_folder import launch_private_folder, socket_path
from lit_mnist.errors import InputError

# Counts what this process has sent through its sockets, which the kernel does not count: `exchange`, the calls;
# `payload`, the bytes of the tensors; and `unix`, all bytes.
SENT: Counter[str] = Counter()
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SOCKET = "socket"
# The number of the call, and its number of bytes.
_HEADER = struct.Struct("!QQ")
# A chunk fits into a connection's buffers, so that all ranks can send before any receives.
_CHUNK_BYTES = 1 << 14
# The rank that connects.
_RANK = struct.Struct("!I")
_BACKLOG = 1024


class PeerExchange:
    """Collectives over direct connections of this rank to all others of the machine, which the first call opens.

    When a rank exits, the calls of the other ranks fail at once. After an error the object cannot be used again.
    Every rank of the default group must take part.

    Args:
        timeout: Seconds to wait for the other ranks.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        # None if the ranks are on several machines.
        self._peers: dict[int, socket.socket] | None = None
        self._is_open = False
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PeerExchange:
        # A copy of a network uses the same connections.
        return self

    def __reduce__(self) -> tuple[type[PeerExchange], tuple[float]]:
        # A network that is loaded from a file connects again.
        return PeerExchange, (self.timeout,)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gathers a tensor from every rank; every rank must call it with the same size and dtype.

        Args:
            own: The tensor of this rank, [values], contiguous, on the CPU.

        Returns:
            The tensors in rank order, [ranks, values].

        Raises:
            OSError: Another rank has exited, or has not sent its tensor in time.
            RuntimeError: Another rank is at another call, or gloo has lost a rank of another machine.
            InputError: No socket can be created.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if not self._is_open:
            self._peers, self._is_open = _connect(rank, self.timeout), True
        gathered = own.new_empty((world_size, own.numel()))
        if self._peers is None:
            dist.all_gather(list(gathered), own)
            return gathered
        gathered[rank] = own
        SENT.update(exchange=1, payload=own.nbytes, unix=len(self._peers) * (_HEADER.size + own.nbytes))
        self._calls += 1
        try:
            self._send_and_receive(gathered.view(torch.uint8).numpy(), rank, self._peers)
        except BaseException:
            # The next call would read the remaining bytes of this one.
            self.close()
            raise
        return gathered

    def all_reduce(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, added in rank order; see `all_gather`."""
        return reduce(torch.add, self.all_gather(own))

    def close(self) -> None:
        """Closes the connections."""
        for peer in (self._peers or {}).values():
            peer.close()

    def _send_and_receive(self, rows: Any, rank: int, peers: dict[int, socket.socket]) -> None:
        own = rows[rank].data
        header = _HEADER.pack(self._calls, own.nbytes)
        for start in range(0, own.nbytes, _CHUNK_BYTES):
            chunk = slice(start, start + _CHUNK_BYTES)
            for peer in peers.values():
                peer.sendall(own[chunk] if start else header + own[chunk])
            for other, peer in peers.items():
                if start == 0 and (theirs := bytes(_receive(peer, bytearray(_HEADER.size), other))) != header:
                    found = "call {} with {} bytes".format(*_HEADER.unpack(theirs))
                    this_call = f"call {self._calls} with {own.nbytes}"
                    raise RuntimeError(f"Rank {other} is at {found}, and this one at {this_call}.")
                _receive(peer, rows[other].data[chunk], other)


def _receive(peer: socket.socket, buffer: Any, other: int | str = "that connects") -> Any:
    left = memoryview(buffer)
    while left:
        count = peer.recv_into(left)
        if not count:
            raise ConnectionError(f"Connection closed by peer: rank {other} has exited.")
        left = left[count:]
    return buffer


def _connect(rank: int, timeout: float) -> dict[int, socket.socket] | None:
    """Connects this rank to all others, and returns the connections by rank; None if there are several machines.

    Each rank listens in a folder of its own, whose path the ranks exchange through the process group.
    """
    deadline = time.monotonic() + timeout
    peers: dict[int, socket.socket] = {}
    try:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            folder, error = _listen(listener, stack)
            ranks = all_gather_json({"machine": _machine(), "folder": folder, "error": error})
            if len({other["machine"] for other in ranks}) > 1:
                return None
            for message in (other["error"] for other in ranks if other["error"]):
                raise InputError(message)
            for other in range(rank):
                peers[other] = peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peer.settimeout(max(0.001, deadline - time.monotonic()))
                with socket_path(Path(ranks[other]["folder"]), _SOCKET) as path:
                    peer.connect(path)
                peer.sendall(_RANK.pack(rank))
            for _ in ranks[rank + 1 :]:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                peer, _ = listener.accept()
                peer.settimeout(timeout)
                (other,) = _RANK.unpack(_receive(peer, bytearray(_RANK.size)))
                peers[other] = peer
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    for peer in peers.values():
        peer.settimeout(timeout)
    return dict(sorted(peers.items()))


def _listen(listener: socket.socket, stack: ExitStack) -> tuple[str, str]:
    """Listens in a new folder until a stack is closed.

    Returns:
        The folder, and why it cannot be used, which all ranks must know; otherwise an empty text.
    """
    place = launch_private_folder() or tempfile.gettempdir()
    try:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True))
        with socket_path(Path(folder), _SOCKET) as path:
            listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        return "", f"No socket can be created in {place} ({error.strerror}): set TMPDIR to a folder on a local disk."
    return folder, ""


def _machine() -> str:
    """Returns what identifies this machine among those of the run."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    return f"{socket.gethostname()} {boot}"
