"""The peer exchange: its results, what it sends, and its timeouts; and the all-gather of JSON values."""

from __future__ import annotations

import math
import os
import socket
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.distributed import distributed_c10d

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.peer_exchange import SENT, PeerExchange
from lit_mnist.distributed.private_folder import VARIABLE, launch_private_folder
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.rendezvous import reachable_address
from lit_mnist.errors import InputError
from lit_mnist.training.examples import Examples, Scored


def leave_private_folder() -> None:
    """Removes the private folder from the environment of this rank, as under torchrun and Slurm."""
    del os.environ[VARIABLE]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_every_rank_s_values_and_their_sum_in_rank_order(tmp_path: Path, world_size: int) -> None:
    def work(rank: Rank) -> None:
        exchange = PeerExchange(timeout=20)
        # The largest tensor does not fit into the buffers of a connection.
        for size, dtype in ((1, torch.float32), (33, torch.float64), (1_000_003, torch.float32)):
            generator = torch.Generator().manual_seed(size)
            values = torch.randn(world_size, size, generator=generator).to(dtype)
            assert torch.equal(exchange.all_gather(values[rank.rank]), values)
            total = values[0].clone()
            for row in values[1:]:
                total += row
            assert torch.equal(exchange.all_reduce(values[rank.rank]), total)
        payload = 2 * (4 + 8 * 33 + 4 * 1_000_003)
        # Each call sends a header of 16 bytes to each other rank.
        expected = {"exchange": 6, "payload": payload, "unix": (world_size - 1) * (payload + 6 * 16)}
        assert expected == SENT

    on_ranks(work, tmp_path, world_size)


def listeners_of(exchange: PeerExchange) -> list[socket.socket]:
    """Returns the listening sockets that this rank opens to connect."""
    opened = []
    listen = socket.socket.listen

    def noted(self: socket.socket, *backlog: int) -> None:
        listen(self, *backlog)
        opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", noted)
        exchange.all_gather(torch.ones(1))
    return opened


def test_the_ranks_of_a_launch_use_private_sockets(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        folder = launch_private_folder()
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        exchange = PeerExchange(timeout=20)
        opened = listeners_of(exchange)
        assert [server.family for server in opened] == [socket.AF_UNIX]
        assert [server.fileno() for server in opened] == [-1]
        assert exchange._peers is not None
        assert {peer.family for peer in exchange._peers.values()} == {socket.AF_UNIX}
        assert len(exchange._peers) == 2
        dist.barrier()
        assert not [path for path in folder.iterdir() if path.is_socket()]

    on_ranks(work, tmp_path, 3)


def test_the_temporary_folder_can_have_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a Unix socket has at most 107 bytes."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def work(rank: Rank) -> None:
        exchange = PeerExchange(timeout=20)
        assert exchange.all_gather(torch.tensor([float(rank.rank)])).tolist() == [[0.0], [1.0]]
        assert [server.family for server in listeners_of(PeerExchange(timeout=20))] == [socket.AF_UNIX]

    on_ranks(work, tmp_path, 2)


def test_ranks_listen_on_loopback_only_and_only_while_they_connect(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        leave_private_folder()
        exchange = PeerExchange(timeout=20)
        addresses = []
        create = socket.create_server

        def noted(address: tuple[str, int], **options: int) -> socket.socket:
            addresses.append(address[0])
            return create(address, **options)

        socket.create_server = noted  # type: ignore[assignment]
        opened = listeners_of(exchange)
        assert addresses == ["127.0.0.1"]
        assert [server.fileno() for server in opened] == [-1]
        assert exchange._peers is not None
        peers = list(exchange._peers.values())
        assert len(peers) == 2
        assert {peer.getpeername()[0] for peer in peers} == {"127.0.0.1"}

    on_ranks(work, tmp_path, 3)


def test_the_other_ranks_do_not_wait_for_a_rank_that_has_exited(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        exchange = PeerExchange(timeout=60)
        exchange.all_gather(torch.ones(1))
        if rank.rank == 1:
            # As the kernel does for a process that has exited.
            exchange.close()
        else:
            with pytest.raises(OSError, match=r"closed by peer|reset by peer|Broken pipe"):
                exchange.all_gather(torch.ones(1))
        dist.barrier()

    on_ranks(work, tmp_path, 2)


def test_the_other_ranks_wait_for_a_missing_rank_only_until_the_timeout(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        exchange = PeerExchange(timeout=30)
        exchange.all_gather(torch.ones(1))
        assert exchange._peers is not None
        if rank.rank == 0:
            for peer in exchange._peers.values():
                peer.settimeout(0.5)
            with pytest.raises(TimeoutError, match="timed out"):
                exchange.all_gather(torch.ones(1))
        dist.barrier()

    on_ranks(work, tmp_path, 2)


def test_a_rank_that_is_at_another_call_causes_an_error(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        exchange = PeerExchange(timeout=30)
        exchange.all_gather(torch.ones(1))
        with pytest.raises((RuntimeError, OSError), match=r"call 2 with \d+ bytes|closed by peer|reset by peer"):
            exchange.all_gather(torch.ones(5 + rank.rank))
        dist.barrier()

    on_ranks(work, tmp_path, 2)


def call(address: tuple[str, int], sent: bytes | None, *, slowly: bool) -> socket.socket:
    """Connects to a rank as another program, and sends something other than the rank's secret."""
    client = socket.create_connection(address)
    if sent is None:
        client.close()
    elif not slowly:
        client.sendall(sent)
    else:

        def trickle() -> None:
            with suppress(OSError):
                for byte in sent:
                    client.send(bytes([byte]))
                    time.sleep(1)

        threading.Thread(target=trickle, daemon=True).start()
    return client


@pytest.mark.parametrize(
    ("sent", "count", "slowly"),
    [
        # Without the secret, but with the number of a rank that has not connected yet.
        pytest.param(bytes(19) + b"\2", 1, False, id="wrong"),
        pytest.param(b"half", 1, False, id="half"),
        pytest.param(None, 3, False, id="gone"),
        pytest.param(b"", 8, False, id="8 idle"),
        pytest.param(bytes(20), 8, True, id="8 slow"),
        pytest.param(b"", 200, False, id="200 idle"),
    ],
)
def test_unknown_clients_that_connect_first_are_rejected(
    tmp_path: Path, sent: bytes | None, count: int, slowly: bool
) -> None:
    """Other programs, which do not know the secret, connect before and during the connection of the ranks.

    The ranks wait for each other for 10 seconds in all, which no other program uses up.
    """

    def work(rank: Rank) -> None:
        leave_private_folder()
        create = socket.create_server
        clients = []

        def watched(address: tuple[str, int], **options: int) -> socket.socket:
            server = create(address, **options)
            if rank.rank < 2:
                clients.extend(call(server.getsockname(), sent, slowly=slowly) for _ in range(count))
            return server

        socket.create_server = watched  # type: ignore[assignment]
        exchange = PeerExchange(timeout=10)
        own = torch.tensor([float(rank.rank)])
        assert exchange.all_gather(own).tolist() == [[0.0], [1.0], [2.0]]
        if rank.rank == 0 and sent:
            with suppress(ConnectionResetError):
                assert clients[0].recv(1) == b""

    on_ranks(work, tmp_path, 3)


def test_all_gather_json_is_exact_and_uses_no_pickle(tmp_path: Path) -> None:
    values: list[Any] = ["", [], {"a": [1e-310, 0.1, -0.0, 2**63, None, True, "\u00e4"]}, list(range(100_000))]

    def work(rank: Rank) -> None:
        distributed_c10d._tensor_to_object = None
        assert all_gather_json(values[rank.rank]) == values
        odd = all_gather_json([math.inf, -math.inf, math.nan])[rank.rank]
        assert odd[:2] == [math.inf, -math.inf]
        assert math.isnan(odd[2])
        examples = Examples(2)
        examples.scored = [Scored(rank.rank, rank.rank / 3, np.full((2, 3), rank.rank, np.uint8))]
        found = [image for image in examples.gather() if isinstance(image, Scored)]
        assert [(image.sample, image.score, image.mask.tolist()) for image in found] == [
            (other, other / 3, [[other] * 3] * 2) for other in (3, 2, 1, 0)
        ]
        examples = Examples(2)
        examples.wrong = [torch.tensor([[rank.rank, 7, 0.1 * rank.rank]], dtype=torch.float64)]
        wrong = examples.gather()
        assert wrong == [(other, 7, 0.1 * other) for other in (3, 2, 1, 0)]

    on_ranks(work, tmp_path, 4)


def test_the_address_belongs_to_the_interface_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert reachable_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert reachable_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(InputError, match="nowhere0"):
        reachable_address()
