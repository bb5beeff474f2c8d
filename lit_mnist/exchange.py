"""Small tensors, sent from rank to rank directly: for what every rank waits for in the middle of a step.

gloo hands each collective to a thread of its own, which waits for another: on two busy cores an all-reduce of a hundred
bytes then takes one to two milliseconds. Here the thread that computes writes to a socket and reads from it, which
takes some 50 microseconds. It is meant for a few kilobytes: each rank sends the same to each other one.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections import Counter
from functools import reduce
from hmac import compare_digest
from typing import Any

import torch
import torch.distributed as dist

from lit_mnist.addresses import own_address

# What this process has sent so far: `exchange`, the number of calls, and `payload`, the bytes handed to them.
SENT: Counter[str] = Counter()
_TOKEN = 16
# Address and port, as the others are told them; the number of a call and its bytes; who calls.
_CARD = struct.Struct(f"!4sH{_TOKEN}s")
_HEADER = struct.Struct("!QQ")
_GREETING = struct.Struct(f"!{_TOKEN}sI")
# What fits into a connection's buffers, so that all ranks can send before any receives.
_AT_ONCE = 1 << 14
_SECONDS_TO_GREET = 2.0


class Exchange:
    """Connections of this rank to all others, made at the first use, which is a collective of the default group.

    Once they are made, a rank that has ended is noticed at once by the others' errors. After an error it is of no use.

    Args:
        timeout: Seconds that a rank waits for the others.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._peers: dict[int, socket.socket] | None = None
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """Returns itself: a copy of a network has the same connections."""
        return self

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Returns every rank's tensor, [ranks, values], by rank; every rank must call it, with the same size and type.

        Args:
            own: This rank's, [values], contiguous, on the CPU.

        Raises:
            OSError: Another rank has ended, or has not sent its tensor in time.
            RuntimeError: Another rank exchanges something else.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if self._peers is None:
            self._peers = _connect(rank, world_size, self.timeout)
        gathered = own.new_empty((world_size, own.numel()))
        gathered[rank] = own
        SENT.update(exchange=1, payload=own.nbytes)
        self._calls += 1
        try:
            self._trade(gathered.view(torch.uint8).numpy(), rank, self._peers)
        except BaseException:
            # What is half read would be taken for the next call's.
            self.close()
            raise
        return gathered

    def all_reduce(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, in the order of the ranks; arguments and errors as of `all_gather`."""
        return reduce(torch.add, self.all_gather(own))

    def close(self) -> None:
        """Closes the connections."""
        for peer in (self._peers or {}).values():
            peer.close()

    def _trade(self, rows: Any, rank: int, peers: dict[int, socket.socket]) -> None:
        """Sends this rank's row of bytes to the others, and fills theirs."""
        own = rows[rank].data
        header = _HEADER.pack(self._calls, own.nbytes)
        for start in range(0, own.nbytes, _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            for peer in peers.values():
                peer.sendall(own[part] if start else header + own[part])
            for other, peer in peers.items():
                if start == 0 and (theirs := bytes(_receive(peer, bytearray(_HEADER.size), other))) != header:
                    found = "call {} with {} bytes".format(*_HEADER.unpack(theirs))
                    own_call = f"call {self._calls} with {own.nbytes}"
                    raise RuntimeError(f"Rank {other} is at {found}, and this one at {own_call}.")
                _receive(peer, rows[other].data[part], other)


def _connect(rank: int, world_size: int, timeout: float) -> dict[int, socket.socket]:
    """Connects this rank with every other: it calls those before it, and is called by those after it."""
    deadline = time.monotonic() + timeout
    peers: dict[int, socket.socket] = {}
    try:
        with socket.create_server((own_address(), 0), backlog=max(world_size, 16)) as listener:
            host, port = listener.getsockname()
            token = secrets.token_bytes(_TOKEN)
            cards = [torch.empty(_CARD.size, dtype=torch.uint8) for _ in range(world_size)]
            own = _CARD.pack(socket.inet_aton(host), port, token)
            dist.all_gather(cards, torch.frombuffer(bytearray(own), dtype=torch.uint8))
            for other in range(rank):
                packed, port, theirs = _CARD.unpack(cards[other].numpy().tobytes())
                peers[other] = socket.create_connection((socket.inet_ntoa(packed), port), timeout=timeout)
                peers[other].sendall(_GREETING.pack(theirs, rank))
            while len(peers) < world_size - 1:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                caller, _ = listener.accept()
                other = _greeted(caller, token)
                if rank < other < world_size and other not in peers:
                    peers[other] = caller
                else:
                    caller.close()
        for peer in peers.values():
            peer.settimeout(timeout)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return dict(sorted(peers.items()))


def _greeted(caller: socket.socket, token: bytes) -> int:
    """Returns the rank that calls, or -1 where it is some other program, which does not know this rank's secret."""
    caller.settimeout(_SECONDS_TO_GREET)
    try:
        theirs, other = _GREETING.unpack(_receive(caller, bytearray(_GREETING.size), -1))
    except OSError:
        return -1
    return int(other) if compare_digest(theirs, token) else -1


def _receive(peer: socket.socket, room: Any, other: int) -> Any:
    """Fills a buffer, and returns it."""
    left = memoryview(room)
    while left:
        count = peer.recv_into(left)
        if not count:
            raise ConnectionError(f"Connection closed by peer: rank {other} has ended.")
        left = left[count:]
    return room
