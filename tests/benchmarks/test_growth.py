"""Growth over a network: the model is that of a ring, and the links between the namespaces are as slow as they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial

import pytest
from conftest import ROOT

from benchmarks import growth
from benchmarks.growth import ALONE, DDP, LINKS, LOCAL_SGD, NETWORKS, POWER_SGD, RANKS, VARIANTS
from benchmarks.network import Link, address, enter, network
from benchmarks.pages.growth import growth_parts


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_model_is_a_ring_in_which_each_rank_waits_for_its_neighbor(ranks: int) -> None:
    """Rank r sends its part of turn t when it has received that of turn t - 1."""
    hop_ms, ms_per_element, elements = 0.3, 0.001, 840
    ready = [0.0] * ranks
    for _ in range(2 * (ranks - 1)):
        ready = [
            max(ready[rank], ready[rank - 1]) + hop_ms + ms_per_element * elements / ranks for rank in range(ranks)
        ]
    assert growth.all_reduce_ms(elements, ranks, hop_ms, ms_per_element) == pytest.approx(max(ready))


def test_the_constants_are_found_again() -> None:
    reduce = partial(growth.all_reduce_ms, ranks=2, hop_ms=1.5, ms_per_element=3e-5)
    found = growth.constants({"small_ms": reduce(256), "large_ms": reduce(2_000_000)})
    assert found == pytest.approx((1.5, 3e-5), rel=0.01)


def test_each_variant_is_predicted_from_the_step_without_communication() -> None:
    def reduce(elements: float) -> float:
        return 10 + elements

    steps = {variant: growth.predict(variant, 100, 8, reduce) for variant in VARIANTS}
    assert (steps[ALONE], steps[DDP], steps["DDP, bfloat16"], steps[LOCAL_SGD]) == (100, 118, 114, 100 + 18 / 8)
    assert steps[POWER_SGD] is None


def test_the_page_shows_what_was_measured_and_predicted() -> None:
    numbers = {"small_ms": 2.0, "large_ms": 20.0, **{f"{net}/{each}": 50.0 for net in NETWORKS for each in VARIANTS}}
    rows = {growth.name_of(ranks, link): [numbers] for link in LINKS for ranks in RANKS}
    found = growth.analyse(rows)
    assert len(found["growth"]) == len(LINKS)
    (part,) = growth_parts(found)
    assert len(part.content.rows) == len(LINKS) * len(NETWORKS) * len(VARIANTS)
    assert growth.analyse({name: [] for name in rows}) == {"growth": []}


@pytest.mark.needs("namespaces")
def test_a_message_takes_the_latency_and_its_bytes_the_bandwidth() -> None:
    """Only lower bounds: a busy machine delivers later."""
    link = Link(gbit_per_s=0.1, latency_ms=20)
    with network(2, link) as namespaces:
        if not (child := os.fork()):
            enter(namespaces[1])
            with socket.create_server((address(1), 2000)) as server:
                peer, _ = server.accept()
                left = 2_000_001
                while left:
                    left -= len(peer.recv(left))
                    if left == 2_000_000:
                        peer.sendall(b"!")
                peer.sendall(b"!")
            os._exit(0)
        took = subprocess.run(
            [sys.executable, "-c", CLIENT, str(namespaces[0])],
            pass_fds=namespaces[:1],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            check=True,
        )
        os.waitpid(child, 0)
    first, second = json.loads(took.stdout)
    assert first >= 0.04
    assert second >= 0.04 + 2_000_000 * 8 / 0.1e9


CLIENT = """
import json, socket, sys, time
from benchmarks.network import address, enter
enter(int(sys.argv[1]))
deadline = time.monotonic() + 20
while True:
    try:
        peer = socket.create_connection((address(1), 2000))
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline
        time.sleep(0.01)
took = []
for size in (1, 2_000_000):
    began = time.perf_counter()
    peer.sendall(bytes(size))
    peer.recv(1)
    took.append(time.perf_counter() - began)
print(json.dumps(took))
"""


@pytest.mark.slow
@pytest.mark.needs("namespaces")
@pytest.mark.timeout(300)
def test_a_step_of_each_variant_is_timed(capfd: pytest.CaptureFixture[str]) -> None:
    assert growth.main(["--ranks", "2", "--gbit", "10"]) == 0
    numbers = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert set(numbers) == {"small_ms", "large_ms", *(f"{net}/{each}" for net in NETWORKS for each in VARIANTS)}
    assert min(numbers.values()) > 0
