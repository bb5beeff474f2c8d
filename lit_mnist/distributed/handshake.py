"""Connections between ranks: each proves that it is one, and no other program that calls makes a rank wait.

On one machine the ranks of a launch meet in its private folder, which other users cannot enter. Elsewhere they meet on
a port, where anybody who reaches it can call: a caller that does not send the secret of the rank that it calls is
turned away. The secrets travel through the process group.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hmac import compare_digest
from pathlib import Path

import torch
import torch.distributed as dist

from lit_mnist.distributed.addresses import own_address
from lit_mnist.distributed.private_folder import own_private_folder, socket_path
from lit_mnist.errors import InputError

_TOKEN = 16
# The secret and the address that the others are told; the secret, and who calls.
_CARD = struct.Struct(f"!{_TOKEN}s24s")
_GREETING = struct.Struct(f"!{_TOKEN}sI")
# From the call to the end of its greeting, which a rank sends at once.
_SECONDS_TO_GREET = 10.0
# Unfinished greetings at a time; beyond them the oldest caller is turned away.
_MOST_CALLERS = 128
_BACKLOG = 1024


def connect(rank: int, world_size: int, timeout: float) -> dict[int, socket.socket]:
    """Connects this rank with every other: it calls those before it, and is called by those after it.

    Every rank of the default group must call it.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        timeout: Seconds to wait for the others, also in each later use of a connection.

    Returns:
        The connections, by rank.

    Raises:
        InputError: This rank cannot be reached by the others.
        OSError: Another rank has ended, or has not called in time.
    """
    deadline = time.monotonic() + timeout
    folder = own_private_folder()
    peers: dict[int, socket.socket] = {}
    try:
        with _listening(folder) as (listener, address):
            token = secrets.token_bytes(_TOKEN)
            cards = [torch.empty(_CARD.size, dtype=torch.uint8) for _ in range(world_size)]
            dist.all_gather(cards, torch.frombuffer(bytearray(_CARD.pack(token, address.encode())), dtype=torch.uint8))
            for other in range(rank):
                theirs, packed = _CARD.unpack(cards[other].numpy().tobytes())
                peers[other] = _call(folder, packed.rstrip(b"\0").decode(), deadline)
                peers[other].sendall(_GREETING.pack(theirs, rank))
            with _Door(listener, token) as door:
                door.welcome(set(range(rank + 1, world_size)), peers, deadline)
        for peer in peers.values():
            peer.settimeout(timeout)
            if peer.family != socket.AF_UNIX:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return dict(sorted(peers.items()))


@contextmanager
def _listening(folder: Path | None) -> Iterator[tuple[socket.socket, str]]:
    """Gives a listening socket and its address: in the launch's private folder, or else a port of this machine."""
    if folder is None:
        with socket.create_server((own_address(), 0), backlog=_BACKLOG) as listener:
            host, port = listener.getsockname()
            yield listener, f"{host}:{port}"
        return
    name = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with socket_path(folder, name) as path:
                listener.bind(path)
        except OSError as error:
            raise InputError(
                f"No socket can be made in {folder} ({error.strerror}): set TMPDIR to a folder on a local disk."
            ) from error
        listener.listen(_BACKLOG)
        try:
            yield listener, name
        finally:
            with suppress(OSError):
                (folder / name).unlink()


def _call(folder: Path | None, address: str, deadline: float) -> socket.socket:
    """Returns a connection to the rank that listens at an address."""
    left = max(0.001, deadline - time.monotonic())
    if folder is None:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=left)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(left)
        with socket_path(folder, address) as path:
            peer.connect(path)
    except BaseException:
        peer.close()
        raise
    return peer


class _Caller:
    """A connection that has not finished its greeting.

    Args:
        connection: The connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + _SECONDS_TO_GREET
        self._read = b""

    def greeting(self, token: bytes) -> int | None:
        """Reads what has come, and returns the rank that calls, or None where more of its greeting is to come.

        Raises:
            OSError: It is some other program, which does not know this rank's secret.
        """
        with suppress(BlockingIOError):
            received = self.connection.recv(_GREETING.size - len(self._read))
            if not received:
                raise ConnectionError("the caller has hung up")
            self._read += received
        if len(self._read) < _GREETING.size:
            return None
        theirs, other = _GREETING.unpack(self._read)
        if not compare_digest(theirs, token):
            raise PermissionError("the caller does not know the secret")
        return int(other)


class _Door:
    """Where the other ranks call, and perhaps other programs of the machine or the network.

    All callers are listened to at the same time, so that none of them makes another wait.

    Args:
        listener: The listening socket.
        token: This rank's secret, which the other ranks know.
    """

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        listener.setblocking(False)
        self._listener, self._token = listener, token
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # The oldest first.
        self._callers: list[_Caller] = []

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in self._callers.copy():
            self._part(caller, close=True)
        self._selector.close()

    def welcome(self, missing: set[int], peers: dict[int, socket.socket], deadline: float) -> None:
        """Waits until the missing ranks have called, and adds their connections to `peers`.

        Raises:
            TimeoutError: A rank has not called in time.
        """
        while missing:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"timed out: rank {min(missing)} has not connected")
            for late in [caller for caller in self._callers if caller.deadline <= now]:
                self._part(late, close=True)
            wait = min([deadline, *(caller.deadline for caller in self._callers)]) - now
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._callers:
                    self._hear(key.data, missing, peers)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Others may have used up the descriptors; any other caller has hung up already.
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                if not self._callers:
                    raise
                self._part(self._callers[0], close=True)
            return
        caller = _Caller(connection)
        self._callers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        if len(self._callers) > _MOST_CALLERS:
            self._part(self._callers[0], close=True)

    def _hear(self, caller: _Caller, missing: set[int], peers: dict[int, socket.socket]) -> None:
        try:
            other = caller.greeting(self._token)
        except OSError:
            self._part(caller, close=True)
            return
        if other is None:
            return
        self._part(caller, close=other not in missing)
        if other in missing:
            missing.remove(other)
            peers[other] = caller.connection

    def _part(self, caller: _Caller, *, close: bool) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)
        if close:
            caller.connection.close()
