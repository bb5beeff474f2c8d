"""The tour of the collective operations: it shows what happened, and counts what was sent."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import child
from processes import LOOPBACK, Done, launched, listening, run_forked

from examples.collectives.__main__ import main
from examples.collectives.group import joined, on_first
from examples.collectives.initialize import show_ways
from examples.collectives.operations import OPERATIONS, show_operations
from examples.collectives.ring import Line, ring_all_reduce, server_all_reduce
from examples.collectives.traffic import count_sent_bytes
from lit_mnist.distributed.rank import Rank

SIZES = (1, 5, 1000, 1001)
AllReduce = Callable[[torch.Tensor, Line], None]


def succeeded(work: Callable[[Rank], None], folder: Path, *, world_size: int) -> Done:
    """Runs `work` on launched ranks; an assertion that fails in a rank fails here."""
    done = launched(work, folder, world_size=world_size)
    assert done.code == 0, done.out + done.err
    return done


# --- the tour


@pytest.fixture(scope="module", params=[2, 3])
def tour(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """Number of ranks, and what the tour printed."""
    done = run_forked(partial(main, ["--ranks", str(request.param)]), tmp_path_factory.mktemp("tour"), 60)
    assert (done.code, done.err) == (0, "")
    return request.param, done.out


def section(text: str, name: str) -> str:
    """Returns what was printed under a headline, up to the next empty line."""
    found = re.search(rf"^{re.escape(name)}\s.*?(?=^$|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"nothing is said of {name}"
    return found[0]


Held = list[list[int]]


def held(text: str) -> Held:
    return [[int(number) for number in piece.split()] for piece in re.findall(r"\[([^]]*)\]", text)]


def seen(text: str, name: str, world_size: int) -> tuple[list[Held], list[Held]]:
    """Returns what each rank held before and after an operation."""
    lines = re.findall(r"^ +rank (\d+) +(\S.*?) +-> +(\S.*)$", section(text, name), re.MULTILINE)
    assert [int(rank) for rank, _, _ in lines] == list(range(world_size))
    return [held(before) for _, before, _ in lines], [held(after) for _, _, after in lines]


def added(tensors: list[list[int]]) -> list[int]:
    return [sum(numbers) for numbers in zip(*tensors, strict=True)]


def expected(name: str, before: list[Held]) -> list[Held]:
    """Returns what an operation must leave on each rank."""
    firsts = [pieces[0] if pieces else [] for pieces in before]
    others: list[Held] = [[] for _ in before[1:]]
    return {
        "broadcast": lambda: [before[0] for _ in before],
        "scatter": lambda: [[piece] for piece in before[0]],
        "gather": lambda: [firsts, *others],
        "all-gather": lambda: [firsts for _ in before],
        "reduce": lambda: [[added(firsts)], *others],
        "all-reduce": lambda: [[added(firsts)] for _ in before],
        "reduce-scatter": lambda: [[added(list(pieces))] for pieces in zip(*before, strict=True)],
        "all-to-all": lambda: [list(pieces) for pieces in zip(*before, strict=True)],
    }[name]()


NAMES = [operation.name for operation in OPERATIONS]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "barrier"])
def test_each_operation_shows_what_it_must_give(tour: tuple[int, str], name: str) -> None:
    world_size, text = tour
    before, after = seen(text, name, world_size)
    assert after == expected(name, before)
    given = [number for pieces in before for piece in pieces for number in piece]
    assert len(set(given)) == len(given) > 0  # or else nobody sees where a number came from
    assert before != after


def test_no_rank_leaves_the_barrier_before_the_last_has_come(tour: tuple[int, str]) -> None:
    world_size, text = tour
    lines = re.findall(r"reached it at (\d+\.\d+) s +-> +left it at (\d+\.\d+) s", section(text, "barrier"))
    assert len(lines) == world_size
    assert min(float(left) for _, left in lines) >= max(float(reached) for reached, _ in lines)


def test_what_is_shown_is_what_the_operation_did(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        dist.all_reduce = lambda *_, **__: None
        dist.all_to_all_single = lambda received, tensor: received.copy_(tensor)
        show_operations(rank)

    out = succeeded(work, tmp_path, world_size=2).out
    for name in NAMES[:-1]:
        before, after = seen(out, name, 2)
        broken = name in {"all-reduce", "all-to-all"}
        assert (after == before) == broken
        assert (after == expected(name, before)) == (not broken)


def test_every_way_to_initialize_is_used_with_its_timeout(tour: tuple[int, str]) -> None:
    world_size, text = tour
    total = world_size * (world_size + 1) // 2
    for name, call, seconds in (
        ("environment", "env://", 10),
        ("file", "FileStore", 15),
        ("TCP store", "TCPStore", 20),
    ):
        told = section(text, name)
        assert call in told
        assert f"= {total} on all {world_size} ranks, timeout {seconds} s\n" in told


def test_a_missing_rank_is_a_timeout_for_the_others(tour: tuple[int, str]) -> None:
    world_size, text = tour
    told = section(text, "3. A timeout:")
    assert f"rank {world_size - 1} does not call an all-reduce that waits 2 s" in told
    lines = re.findall(r"^ +rank (\d+) +(.*)$", told, re.MULTILINE)
    assert [int(rank) for rank, _ in lines] == list(range(world_size))
    assert lines[-1][1] == "did not call it"
    assert all(re.match(r"timed out after \d+\.\d s: \w+Error: \w+", line) for _, line in lines[:-1])
    assert "Timed out waiting 2000ms" in told


def test_the_table_of_bytes_counts_every_rank(tour: tuple[int, str]) -> None:
    world_size, text = tour
    table = text[text.index("4. Bytes sent") :]
    size = 4_000_000
    assert f"all-reduce of {size:,} bytes on {world_size} ranks" in table
    rows = {
        name: (int(ring.replace(",", "")), int(server.replace(",", "")))
        for name, ring, server in re.findall(r"^  (rank \d+|busiest|all) +([\d,]+) +([\d,]+)$", table, re.MULTILINE)
    }
    ranks = [rows.pop(f"rank {rank}") for rank in range(world_size)]
    ring, server = ([pair[column] for pair in ranks] for column in (0, 1))
    assert server == [(world_size - 1) * size, *[size] * (world_size - 1)]
    assert sum(ring) == 2 * (world_size - 1) * size
    assert max(ring) - min(ring) <= 4  # one number more or less: a million cannot be divided by three
    assert rows == {"busiest": (max(ring), max(server)), "all": (sum(ring), sum(server))}


def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        destroy = dist.destroy_process_group
        found: list[set[str]] = []

        def look_first() -> None:
            pids = [0, 0]
            dist.all_gather_object(pids, os.getpid())
            # One after the other: each check opens files that the other one could see.
            for looker in (0, 1):
                if rank.rank == looker:
                    found.append(set(listening([pids[1 - looker]])))
                dist.barrier()
            destroy()

        dist.destroy_process_group = look_first
        show_ways(tmp_path, rank)
        assert len(found) == 3
        assert all(addresses and addresses <= LOOPBACK for addresses in found), found

    succeeded(work, tmp_path, world_size=2)


# --- the ring and the parameter server


def check_sums(rank: Rank) -> None:
    """Adds tensors of all sizes by both algorithms; rank 0 prints how many sums were right."""
    checked = 0
    with joined(rank):
        for all_reduce in (ring_all_reduce, server_all_reduce):
            for size in SIZES:
                whole = torch.arange(size, dtype=torch.float64) * (rank.rank + 1)
                all_reduce(whole, Line())
                ranks = rank.world_size * (rank.world_size + 1) // 2
                assert torch.equal(whole, torch.arange(size, dtype=torch.float64) * ranks)

                own = torch.randn(size, generator=torch.Generator().manual_seed(rank.rank))
                total, ours = own.clone(), own.clone()
                dist.all_reduce(total)
                all_reduce(ours, Line())
                torch.testing.assert_close(ours, total)
                on_all = [torch.empty(size) for _ in range(rank.world_size)]
                dist.all_gather(on_all, ours)
                assert all(torch.equal(other, ours) for other in on_all)
                checked += 1
        square = torch.full((3, 7), rank.rank, dtype=torch.int32)
        ring_all_reduce(square, Line())
        assert square.tolist() == [[sum(range(rank.world_size))] * 7] * 3
    if rank.is_first:
        print(f"{checked} sums are right")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_ring_and_the_server_give_the_sum(tmp_path: Path, world_size: int) -> None:
    assert succeeded(check_sums, tmp_path, world_size=world_size).out == f"{2 * len(SIZES)} sums are right\n"


def count_bytes(rank: Rank) -> None:
    """Prints on rank 0 what each rank counted, and checks it against a count of its own at torch's isend."""
    really = 0
    isend = dist.isend

    def counting(tensor: torch.Tensor, dst: int) -> dist.Work | None:
        nonlocal really
        really += len(tensor.numpy().tobytes())
        return isend(tensor, dst)

    dist.isend = counting
    found = []
    with joined(rank):
        for size in (*SIZES, 1200):
            for all_reduce in (ring_all_reduce, server_all_reduce):
                really, line = 0, Line()
                all_reduce(torch.ones(size, dtype=torch.float64), line)
                assert line.bytes_sent == really
                found.append(really)
        pair = count_sent_bytes(rank, 1200)
        sent = on_first(rank, (found, pair))
    if rank.is_first:
        print(json.dumps(sent))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_bytes_are_those_that_were_sent(tmp_path: Path, world_size: int) -> None:
    sent = json.loads(succeeded(count_bytes, tmp_path, world_size=world_size).out)
    assert len(sent) == world_size
    for number, size in enumerate((*SIZES, 1200)):
        data = size * 8
        ring, server = ([found[2 * number + column] for found, _ in sent] for column in (0, 1))
        assert server == [(world_size - 1) * data, *[data] * (world_size - 1)]
        assert sum(ring) == 2 * (world_size - 1) * data
        if size % world_size == 0:
            assert ring == [2 * (world_size - 1) * data // world_size] * world_size
    # The same in float32: half of the bytes.
    assert [pair for _, pair in sent] == [[found[-2] // 2, found[-1] // 2] for found, _ in sent]


# --- the command


@pytest.mark.slow
def test_the_benchmark_writes_measurements_and_a_plot(tmp_path: Path) -> None:
    figures, image = tmp_path / "figures.json", tmp_path / "image.png"
    words = ["--bench", "--ranks", "2", "--largest", "16384", "--json", str(figures), "--plot", str(image)]
    done = run_forked(partial(main, words), tmp_path, 60)
    assert done.code == 0, done.err
    assert image.read_bytes().startswith(b"\x89PNG")
    measured = json.loads(figures.read_text())
    assert (measured["world_size"], measured["backend"]) == (2, "gloo")
    rows = measured["figures"]
    expected_rows = [(size, name) for size in (1024, 4096, 16384) for name in ("all_reduce", "ring", "server")]
    assert [(row["bytes"], row["operation"]) for row in rows] == expected_rows
    for row in rows:
        assert 0 < row["seconds_q1"] <= row["seconds"] <= row["seconds_q3"]
        assert row["repeats"] > 0
        assert row["algorithm_gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["bus_gb_per_s"] == pytest.approx(row["algorithm_gb_per_s"])  # 2 (N - 1) / N is 1 for two ranks
        assert row["bytes_sent"] == (None if row["operation"] == "all_reduce" else [row["bytes"]] * 2)
    assert [line.split()[:2] for line in done.out.splitlines()[-3:]] == [["1", "KiB"], ["4", "KiB"], ["16", "KiB"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "1"], "--ranks is 1"),
        (["--ranks", "-2"], "--ranks is -2"),
        (["--ranks", "1000000"], "--ranks is 1000000"),
        (["--ranks", "two"], "--ranks"),
        (["--ranks"], "--ranks"),
        (["--rank", "3"], "--rank"),
        (["tour"], "tour"),
        (["--json", "figures.json"], "--json belongs to the bench"),
        (["--plot"], "--plot belongs to the bench"),
        (["--largest", "4096"], "--largest belongs to the bench"),
        (["--bench", "--largest", "1023"], "--largest is 1023"),
        (["--bench", "--largest", "10000000000000"], "--largest is 10000000000000"),
        (["--bench", "--plot", "image.xyz"], "--plot is image.xyz"),
        (["--bench", "--json", "no/such/folder/figures.json"], "no folder no/such/folder"),
        (["--bench", "--json", "."], "which is a folder"),
    ],
)
def test_bad_arguments_are_rejected_in_one_line(capfd: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


AS_A_COMMAND = """
import json, runpy, sys
sys.argv[1:] = ["--ranks", "0"]
try:
    runpy.run_module("examples.collectives", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(json.dumps({"code": end.code, "loaded": list(sys.modules)}))
"""


def test_the_module_is_a_command_that_needs_no_lightning() -> None:
    done = child(AS_A_COMMAND)
    assert done["code"] == 2
    loaded = {name.partition(".")[0] for name in done["loaded"]}
    assert "torch" in loaded
    assert not loaded & {"lightning", "pytorch_lightning", "torchmetrics", "matplotlib"}
