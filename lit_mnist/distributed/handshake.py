"""Connects the ranks by sockets with authentication. Other programs that connect delay no rank.

On one machine the ranks of a launch use Unix sockets in its private folder, which other users cannot enter. Otherwise
they use TCP ports, which anybody may reach. Each rank has a secret, which the ranks exchange through the process group.
A rank closes a connection that does not begin with its secret.
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

from lit_mnist.distributed.private_folder import launch_private_folder, socket_path
from lit_mnist.distributed.rendezvous import reachable_address
from lit_mnist.errors import InputError

_SECRET_BYTES = 16
# The secret and the address of a rank.
_ENDPOINT = struct.Struct(f"!{_SECRET_BYTES}s24s")
# The first bytes of a connection: the secret of the rank that accepts it, and the rank that connects.
_HELLO = struct.Struct(f"!{_SECRET_BYTES}sI")
_SECONDS_TO_SAY_HELLO = 10.0
# If there are more unauthenticated connections, the oldest one is closed.
_MOST_PENDING = 128
_BACKLOG = 1024


def connect(rank: int, world_size: int, timeout: float) -> dict[int, socket.socket]:
    """Connects this rank to all others; every rank of the default group must call it.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        timeout: Seconds to wait for the other ranks, also in each later use of a connection.

    Returns:
        The connections by rank.

    Raises:
        InputError: The other ranks cannot reach this one.
        OSError: Another rank has exited, or has not connected in time.
    """
    deadline = time.monotonic() + timeout
    folder = launch_private_folder()
    peers: dict[int, socket.socket] = {}
    try:
        with _listening(folder) as (listener, address):
            secret = secrets.token_bytes(_SECRET_BYTES)
            own = torch.frombuffer(bytearray(_ENDPOINT.pack(secret, address.encode())), dtype=torch.uint8)
            endpoints = [torch.empty_like(own) for _ in range(world_size)]
            dist.all_gather(endpoints, own)
            for other in range(rank):
                other_secret, packed = _ENDPOINT.unpack(endpoints[other].numpy().tobytes())
                peers[other] = _connect_to(folder, packed.rstrip(b"\0").decode(), deadline)
                peers[other].sendall(_HELLO.pack(other_secret, rank))
            with _Acceptor(listener, secret) as acceptor:
                acceptor.accept(set(range(rank + 1, world_size)), peers, deadline)
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
    """Yields a listening socket and its address, in the private folder or, without one, on a TCP port."""
    if folder is None:
        with socket.create_server((reachable_address(), 0), backlog=_BACKLOG) as listener:
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
                f"No socket can be created in {folder} ({error.strerror}): set TMPDIR to a folder on a local disk."
            ) from error
        listener.listen(_BACKLOG)
        try:
            yield listener, name
        finally:
            with suppress(OSError):
                (folder / name).unlink()


def _connect_to(folder: Path | None, address: str, deadline: float) -> socket.socket:
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


class _Acceptor:
    """Accepts and authenticates all connections concurrently, so that none delays another."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        listener.setblocking(False)
        self._listener, self._secret = listener, secret
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # The deadline of each unauthenticated connection and the bytes received from it, oldest first.
        self._pending: dict[socket.socket, tuple[float, bytes]] = {}

    def __enter__(self) -> _Acceptor:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._pending):
            self._forget(connection).close()
        self._selector.close()

    def accept(self, missing: set[int], peers: dict[int, socket.socket], deadline: float) -> None:
        """Waits until the missing ranks have connected, and moves them to `peers`."""
        while missing:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"timed out: rank {min(missing)} has not connected")
            for late in [connection for connection, (until, _) in self._pending.items() if until <= now]:
                self._forget(late).close()
            wait = min([deadline, *(until for until, _ in self._pending.values())]) - now
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._listener:
                    self._accept_one()
                # It may have been closed to make room for a newer one.
                elif isinstance(connection := key.fileobj, socket.socket) and connection in self._pending:
                    self._authenticate(connection, missing, peers)

    def _accept_one(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Other programs may use up the file descriptors. Any other error means that the connection was closed.
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                if not self._pending:
                    raise
                self._forget(next(iter(self._pending))).close()
            return
        connection.setblocking(False)
        self._pending[connection] = (time.monotonic() + _SECONDS_TO_SAY_HELLO, b"")
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._pending) > _MOST_PENDING:
            self._forget(next(iter(self._pending))).close()

    def _authenticate(self, connection: socket.socket, missing: set[int], peers: dict[int, socket.socket]) -> None:
        """Reads what a connection has sent, and keeps the connection if that is the hello of a missing rank."""
        until, received = self._pending[connection]
        chunk = b""
        try:
            chunk = connection.recv(_HELLO.size - len(received))
        except BlockingIOError:
            return
        except OSError:
            pass
        received += chunk
        if chunk and len(received) < _HELLO.size:
            self._pending[connection] = (until, received)
            return
        self._forget(connection)
        if len(received) == _HELLO.size:
            secret, other = _HELLO.unpack(received)
            if compare_digest(secret, self._secret) and other in missing:
                missing.remove(other)
                peers[other] = connection
                return
        connection.close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        del self._pending[connection]
        self._selector.unregister(connection)
        return connection
