"""The exchange of small tensors between ranks: what it gives, what it sends, and that it waits for nobody for ever."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks

from lit_mnist.addresses import own_address
from lit_mnist.errors import InputError
from lit_mnist.exchange import SENT, Exchange
from lit_mnist.ranks import Rank


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_every_rank_s_values_and_their_sum_in_rank_order(tmp_path: Path, world_size: int) -> None:
    def work(rank: Rank) -> None:
        exchange = Exchange(timeout=20)
        # The largest does not fit into a connection's buffers.
        for size, dtype in ((1, torch.float32), (33, torch.float64), (1_000_003, torch.float32)):
            generator = torch.Generator().manual_seed(size)
            values = torch.randn(world_size, size, generator=generator).to(dtype)
            assert torch.equal(exchange.all_gather(values[rank.rank]), values)
            total = values[0].clone()
            for row in values[1:]:
                total += row
            assert torch.equal(exchange.all_reduce(values[rank.rank]), total)
        assert SENT == {"exchange": 6, "payload": 2 * (4 + 8 * 33 + 4 * 1_000_003)}

    on_ranks(work, tmp_path, world_size)


def test_only_loopback_is_listened_on_and_nothing_once_all_are_connected(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        exchange = Exchange(timeout=20)
        listening = []
        create = socket.create_server

        def noted(address: tuple[str, int], **options: int) -> socket.socket:
            listening.append(create(address, **options))
            assert address[0] == "127.0.0.1"
            return listening[-1]

        socket.create_server = noted  # type: ignore[assignment]
        exchange.all_gather(torch.ones(1))
        assert [server.fileno() for server in listening] == [-1]
        assert exchange._peers is not None
        peers = list(exchange._peers.values())
        assert len(peers) == 2
        assert {peer.getpeername()[0] for peer in peers} == {"127.0.0.1"}

    on_ranks(work, tmp_path, 3)


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        exchange = Exchange(timeout=60)
        exchange.all_gather(torch.ones(1))
        if rank.rank == 1:
            # As the kernel does for a process that has ended.
            exchange.close()
        else:
            with pytest.raises(OSError, match=r"closed by peer|reset by peer|Broken pipe"):
                exchange.all_gather(torch.ones(1))
        dist.barrier()

    on_ranks(work, tmp_path, 2)


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_time_out(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        exchange = Exchange(timeout=30)
        exchange.all_gather(torch.ones(1))
        assert exchange._peers is not None
        if rank.rank == 0:
            for peer in exchange._peers.values():
                peer.settimeout(0.5)
            with pytest.raises(TimeoutError, match="timed out"):
                exchange.all_gather(torch.ones(1))
        dist.barrier()

    on_ranks(work, tmp_path, 2)


def test_a_rank_that_exchanges_something_else_is_noticed(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        exchange = Exchange(timeout=30)
        exchange.all_gather(torch.ones(1))
        with pytest.raises((RuntimeError, OSError), match=r"call 2 with \d+ bytes|closed by peer|reset by peer"):
            exchange.all_gather(torch.ones(5 + rank.rank))
        dist.barrier()

    on_ranks(work, tmp_path, 2)


@pytest.mark.parametrize("said", [bytes(20), b"", b"half", None], ids=["wrong", "nothing", "half", "gone"])
def test_a_stranger_that_calls_first_is_turned_away(tmp_path: Path, said: bytes | None) -> None:
    """Some other program of the machine connects while the ranks do; it does not know their secret."""

    def work(rank: Rank) -> None:
        create = socket.create_server
        strangers = []

        def watched(address: tuple[str, int], **options: int) -> socket.socket:
            server = create(address, **options)
            stranger = socket.create_connection(server.getsockname())
            strangers.append(stranger)
            stranger.close() if said is None else stranger.sendall(said)
            return server

        socket.create_server = watched  # type: ignore[assignment]
        exchange = Exchange(timeout=20)
        own = torch.tensor([float(rank.rank)])
        assert exchange.all_gather(own).tolist() == [[0.0], [1.0]]
        if rank.rank == 0 and said:
            assert strangers[0].recv(1) == b""

    on_ranks(work, tmp_path, 2)


def test_the_address_is_that_of_the_interface_which_the_ranks_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(InputError, match="nowhere0"):
        own_address()
