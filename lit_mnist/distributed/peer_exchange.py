"""Small tensors, sent from rank to rank directly: for what every rank waits for in the middle of a step.

gloo hands each collective to a thread of its own, which waits for another: on two busy cores an all-reduce of a hundred
bytes then takes one to two milliseconds. Here the thread that computes writes to a socket and reads from it, which
takes some 50 microseconds. It is meant for a few kilobytes: each rank sends the same to each other one.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from lit_mnist.distributed.handshake import connect

# What this process has sent so far: `exchange`, the number of calls; `payload`, the bytes handed to them; and `unix`,
# the bytes sent through Unix sockets, which the kernel does not count.
SENT: Counter[str] = Counter()
# The number of a call and its bytes.
_HEADER = struct.Struct("!QQ")
# What fits into a connection's buffers, so that all ranks can send before any receives.
_AT_ONCE = 1 << 14


class PeerExchange:
    """Connections of this rank to all others, made at the first use, which is a collective of the default group.

    Once they are made, a rank that has ended is noticed at once by the others' errors. After an error it is of no use.

    Args:
        timeout: Seconds that a rank waits for the others.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._peers: dict[int, socket.socket] | None = None
        self._calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PeerExchange:
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
            self._peers = connect(rank, world_size, self.timeout)
        gathered = own.new_empty((world_size, own.numel()))
        gathered[rank] = own
        by_unix = sum(peer.family == socket.AF_UNIX for peer in self._peers.values())
        SENT.update(exchange=1, payload=own.nbytes, unix=by_unix * (_HEADER.size + own.nbytes))
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


def _receive(peer: socket.socket, room: Any, other: int) -> Any:
    """Fills a buffer, and returns it."""
    left = memoryview(room)
    while left:
        count = peer.recv_into(left)
        if not count:
            raise ConnectionError(f"Connection closed by peer: rank {other} has ended.")
        left = left[count:]
    return room
