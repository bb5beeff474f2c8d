"""Growth over a network: the model is that of a ring, and the links between the namespaces are as slow as they say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest
from conftest import ROOT

from benchmarks import growth, variants
from benchmarks.growth import Constants
from benchmarks.network import LINKS, Link, address, enter, network
from benchmarks.pages.growth import growth_parts
from benchmarks.variants import ALONE, BFLOAT16, DDP, LOCAL_SGD, NETWORKS, POWER_SGD, RANKS


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_model_is_a_ring_in_which_each_rank_waits_for_its_neighbor(ranks: int) -> None:
    """Rank r sends its part of turn t when it has received that of turn t - 1; two cores work for all."""
    constants, elements = Constants(0.3, 0.001, 0.2, 0.002, cores=2), 840
    part = elements / ranks
    hop = 0.3 + 0.001 * part + ranks * (0.2 + 0.002 * part) / 2
    ready = [0.0] * ranks
    for _ in range(2 * (ranks - 1)):
        ready = [max(ready[rank], ready[rank - 1]) + hop for rank in range(ranks)]
    assert constants.all_reduce(elements, ranks) == pytest.approx(max(ready))


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_the_constants_are_found_again(cores: int) -> None:
    constants = Constants(hop=1.5, element=3e-5, hop_cpu=0.4, element_cpu=1e-5, cores=cores)
    numbers = {f"{name}_ms": constants.all_reduce(elements, 2) for name, elements in (("small", 256), ("large", 2e6))}
    # Two ranks with two messages each.
    numbers |= {f"{name}_cpu_ms": 4 * (0.4 + 1e-5 * part) for name, part in (("small", 128), ("large", 1e6))}
    assert asdict(Constants.of(numbers, cores)) == pytest.approx(asdict(constants), rel=0.01)


def test_each_variant_is_predicted_from_the_step_without_communication() -> None:
    constants = Constants(hop=1, element=0.5, hop_cpu=0, element_cpu=0, cores=1)
    steps = {variant: growth.predict(variant, 100, 8, 2, constants) for variant in (ALONE, DDP, BFLOAT16, LOCAL_SGD)}
    assert steps == {ALONE: 100, DDP: 106, BFLOAT16: 104, LOCAL_SGD: 100 + 6 / 8}
    assert growth.predict(POWER_SGD, 100, 8, 2, constants) is None


def test_the_page_shows_what_was_measured_and_predicted() -> None:
    steps = [f"{net}/{variant}" for net, (_, variants) in NETWORKS.items() for variant in variants]
    numbers = {
        "small_ms": 2.0,
        "large_ms": 20.0,
        "small_cpu_ms": 1.0,
        "large_cpu_ms": 4.0,
        **dict.fromkeys(steps, 50.0),
    }
    rows = {growth.name_of(ranks, link): [numbers] for link in LINKS for ranks in RANKS}
    found = growth.analyse(rows)
    (part,) = growth_parts(found)
    assert len(part.content.rows) == len(LINKS) * len(steps)
    assert growth.analyse({name: [] for name in rows}) == {"growth": []}
    rows[growth.name_of(8, LINKS[0])] = []
    assert {step["ranks"] for step in growth.analyse(rows)["growth"][0]["steps"]} == {2, 4}


@pytest.mark.needs("namespaces")
def test_a_message_takes_the_latency_and_its_bytes_the_bandwidth() -> None:
    """Only lower bounds: a busy machine delivers later."""
    link = Link(gbit_per_s=0.1, latency_ms=20)
    with network(2, link) as made:
        if not (child := os.fork()):
            enter(made.namespaces[1])
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
            [sys.executable, "-c", CLIENT, str(made.namespaces[0])],
            pass_fds=made.namespaces[:1],
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
    assert variants.main(["--ranks", "2", "--gbit", "10"]) == 0
    numbers = json.loads(capfd.readouterr().out.splitlines()[-1])
    steps = {f"{net}/{variant}" for net, (_, names) in NETWORKS.items() for variant in names}
    assert set(numbers) == {"small_ms", "small_cpu_ms", "large_ms", "large_cpu_ms", *steps}
    assert min(numbers.values()) > 0
