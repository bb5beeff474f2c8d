"""Small tensors, sent from rank to rank directly: for what every rank waits for in the middle of a step.

gloo hands each collective to a thread of its own, which waits for another: on two busy cores an all-reduce of a hundred
bytes then takes one to two milliseconds. Here the thread that computes writes to a socket and reads from it, which
takes some 50 microseconds. It is meant for a few kilobytes: each rank sends the same to each other one.
"""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from functools import reduce
from hmac import compare_digest
from typing import Any

import torch
import torch.distributed as dist

from lit_mnist.ranks import own_address

# What this process has sent so far: `exchange`, the number of calls, and `payload`, the bytes handed to them.
SENT: Counter[str] = Counter()
_TOKEN = 16
_ADDRESS = 4
# What fits into a connection's buffers on any system, so that all ranks can send before any receives.
_AT_ONCE = 1 << 16


class Exchange:
    """Connections of this rank to all others, made at the first use, which is a collective of the default group.

    A rank that has ended is noticed at once by the others' errors.

    Args:
        timeout: Seconds that a rank waits for the others.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._peers: dict[int, socket.socket] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """Returns itself: a copy of a network has the same connections."""
        return self

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Returns every rank's tensor, [ranks, values], by rank; every rank must call it, with the same size and type.

        Args:
            own: This rank's, [values], contiguous, on the CPU.

        Raises:
            OSError: Another rank has ended, or has not sent its tensor in time.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size > 1 and not self._peers:
            self._peers = _connect(rank, world_size, self.timeout)
        gathered = own.new_empty((world_size, own.numel()))
        gathered[rank] = own
        rows = gathered.view(torch.uint8).numpy()
        SENT.update(exchange=1, payload=own.nbytes)
        for start in range(0, own.nbytes, _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            for peer in self._peers.values():
                peer.sendall(rows[rank, part].data)
            for other, peer in self._peers.items():
                _receive(peer, memoryview(rows[other, part].data), other)
        return gathered

    def all_reduce(self, own: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the ranks, in the order of the ranks; arguments and errors as of `all_gather`."""
        return reduce(torch.add, self.all_gather(own))


def _connect(rank: int, world_size: int, timeout: float) -> dict[int, socket.socket]:
    """Connects this rank with every other: it calls those before it, and is called by those after it."""
    peers: dict[int, socket.socket] = {}
    with socket.create_server((own_address(), 0), backlog=world_size) as listener:
        host, port = listener.getsockname()
        token = secrets.token_bytes(_TOKEN)
        own = socket.inet_aton(host) + port.to_bytes(2, "big") + token
        cards = [torch.empty(len(own), dtype=torch.uint8) for _ in range(world_size)]
        dist.all_gather(cards, torch.frombuffer(bytearray(own), dtype=torch.uint8))
        for other in range(rank):
            card = cards[other].numpy().tobytes()
            address = socket.inet_ntoa(card[:_ADDRESS]), int.from_bytes(card[_ADDRESS : _ADDRESS + 2], "big")
            peers[other] = socket.create_connection(address, timeout=timeout)
            peers[other].sendall(card[-_TOKEN:] + rank.to_bytes(4, "big"))
        listener.settimeout(timeout)
        while len(peers) < world_size - 1:
            caller, _ = listener.accept()
            caller.settimeout(timeout)
            greeting = bytearray(_TOKEN + 4)
            _receive(caller, memoryview(greeting), -1)
            if compare_digest(greeting[:_TOKEN], token):
                peers[int.from_bytes(greeting[_TOKEN:], "big")] = caller
            else:
                # Some other program's.
                caller.close()
    for peer in peers.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dict(sorted(peers.items()))


def _receive(peer: socket.socket, room: memoryview, other: int) -> None:
    while room:
        count = peer.recv_into(room)
        if not count:
            raise ConnectionError(f"Connection closed by peer: rank {other} has ended.")
        room = room[count:]
