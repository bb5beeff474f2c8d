"""The peer exchange: its results, what it sends, and its timeouts; and the all-gather of JSON values."""

from __future__ import annotations

import math
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.distributed import distributed_c10d

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.peer_exchange import SENT, PeerExchange
from lit_mnist.distributed.private_folder import VARIABLE, launch_private_folder
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.training.examples import Examples


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


def listeners_of(exchange: PeerExchange) -> list[tuple[socket.socket, Path]]:
    """Returns the listening sockets that this rank opens to connect, and their folders."""
    opened: list[tuple[socket.socket, Path]] = []
    listen, make_folder = socket.socket.listen, tempfile.mkdtemp
    folders: list[Path] = []

    def noted_folder(*words: str | None, **options: str) -> str:
        folders.append(Path(make_folder(*words, **options)))
        assert stat.S_IMODE(folders[-1].stat().st_mode) == 0o700
        return str(folders[-1])

    def noted(self: socket.socket, *backlog: int) -> None:
        listen(self, *backlog)
        opened.append((self, folders[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", noted)
        patch.setattr(tempfile, "mkdtemp", noted_folder)
        exchange.all_gather(torch.ones(1))
    return opened


@pytest.mark.parametrize("launcher", ["own", "external"])
def test_the_ranks_of_a_machine_use_private_sockets_only_while_they_connect(tmp_path: Path, launcher: str) -> None:
    def work(rank: Rank) -> None:
        place = launch_private_folder()
        assert place is not None
        if launcher == "external":
            leave_private_folder()
            place = Path(tempfile.gettempdir())
        exchange = PeerExchange(timeout=20)
        [(server, folder)] = listeners_of(exchange)
        assert server.family == socket.AF_UNIX
        assert server.fileno() == -1
        assert folder.parent == place
        assert exchange._peers is not None
        assert {peer.family for peer in exchange._peers.values()} == {socket.AF_UNIX}
        assert len(exchange._peers) == 2
        dist.barrier()
        assert not folder.exists()

    on_ranks(work, tmp_path, 3)


def test_the_ranks_of_several_machines_exchange_the_same_values_by_gloo(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        socket.gethostname = lambda: f"host-{rank.rank // 2}"  # type: ignore[assignment]
        exchange = PeerExchange(timeout=20)
        assert exchange.all_gather(torch.tensor([rank.rank, 0.5])).tolist() == [[0, 0.5], [1, 0.5], [2, 0.5]]
        assert exchange.all_reduce(torch.tensor([0.1 * rank.rank])) == torch.tensor(0.1) + torch.tensor(0.2)
        assert exchange._peers is None
        assert not SENT

    on_ranks(work, tmp_path, 3)


def test_a_folder_without_sockets_is_named_on_every_rank(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        leave_private_folder()
        if rank.rank == 1:
            tempfile.tempdir = str(tmp_path / "missing")
        with pytest.raises(InputError, match="missing"):
            PeerExchange(timeout=20).all_gather(torch.ones(1))

    on_ranks(work, tmp_path, 2)


def test_the_temporary_folder_can_have_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a Unix socket has at most 107 bytes."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def work(rank: Rank) -> None:
        exchange = PeerExchange(timeout=20)
        assert exchange.all_gather(torch.tensor([float(rank.rank)])).tolist() == [[0.0], [1.0]]
        assert [server.family for server, _ in listeners_of(PeerExchange(timeout=20))] == [socket.AF_UNIX]

    on_ranks(work, tmp_path, 2)


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


def test_all_gather_json_is_exact_and_uses_no_pickle(tmp_path: Path) -> None:
    values: list[Any] = ["", [], {"a": [1e-310, 0.1, -0.0, 2**63, None, True, "\u00e4"]}, list(range(100_000))]

    def work(rank: Rank) -> None:
        distributed_c10d._tensor_to_object = None
        assert all_gather_json(values[rank.rank]) == values
        odd = all_gather_json([math.inf, -math.inf, math.nan])[rank.rank]
        assert odd[:2] == [math.inf, -math.inf]
        assert math.isnan(odd[2])
        examples = Examples()
        examples.wrong = [torch.tensor([[rank.rank, 7, 0.1 * rank.rank]], dtype=torch.float64)]
        wrong = examples.gather()
        assert wrong == [(other, 7, 0.1 * other) for other in (3, 2, 1, 0)]

    on_ranks(work, tmp_path, 4)
