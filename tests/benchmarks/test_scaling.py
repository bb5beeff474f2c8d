"""Scaling: the formulas count what is sent, the programs to compare with run, and the page shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_page import bench_page
from conftest import Program, run_forked

from benchmarks import lockstep
from benchmarks import scaling as module
from benchmarks.scaling import (
    RAW_DDP,
    SERVER,
    VARIANTS,
    ScalingOptions,
    collectives_of,
    name_of,
    scaling,
    traffic_of,
)
from benchmarks.workload import Collective
from lit_mnist.comparison.equality import Run
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.models.build import build_net


@pytest.fixture(scope="module")
def collectives() -> dict[str, list[Collective]]:
    return collectives_of(build_net(Experiment().model, num_classes=10, seed=0))


def test_a_server_moves_more_than_a_ring_from_three_ranks_on() -> None:
    ring, server = Collective("all_reduce", 1200), Collective("server", 1200)
    assert [ring.sent(ranks) for ranks in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
    assert [server.sent(ranks) for ranks in (1, 2, 3, 4)] == [0, 1200, 2400, 3600]
    exchange = Collective("exchange", 1200)
    waits = [[each.hops(ranks) for ranks in (1, 2, 3, 4)] for each in (ring, server, exchange)]
    assert waits == [[0, 2, 4, 6], [0, 2, 2, 2], [0, 1, 1, 1]]


@pytest.mark.parametrize(("engine", "ranks"), [("raw_ddp", 2), ("raw_ddp", 3), ("parameter_server", 2)])
def test_the_formulas_count_what_a_rank_sends(
    shared_program: Program, collectives: dict[str, list[Collective]], engine: str, ranks: int
) -> None:
    sizes = ("--batch-size", 12, "--data.train_size", 240, "--data.val_size", 0, "--max-steps", 9)
    flags = ("--devices", ranks, *sizes, "--run.threads", 1, "--precision", "32-true", "--run.trace", "traffic")
    shared_program.runs += 1
    folder = shared_program.folder / f"scaling-{engine}-{ranks}"
    done = shared_program("fit", *flags, "--run-dir", folder, engine=engine)
    assert done.code == 0, done.out + done.err
    found = traffic_of(Run.read(folder), engine, collectives[engine])
    # Beside each step's own, now and then a few numbers are agreed on.
    assert found["payload_formula"] <= found["payload_bytes"] <= found["payload_formula"] + 200
    assert found["payload_bytes"] == pytest.approx(found["payload_formula"], rel=0.002)
    if found["bytes_sent"] is not None and engine == RAW_DDP:
        assert found["bytes_sent"] == pytest.approx(found["data_formula"] + found["framing_formula"], rel=0.02)


@pytest.mark.parametrize("mode", ["", "--independent", "--ddp", "--flat"])
def test_each_mode_of_lockstep_runs(tmp_path: Path, mode: str) -> None:
    words = ["--ranks", "2", "--batch-size", "8", "--steps", "24", "--threads", "1", "--precision", "32-true"]
    done = run_forked(lambda: lockstep.main([*words, *mode.split()]), tmp_path)
    assert done.code == 0, done.err
    numbers = json.loads(done.out.splitlines()[-1])
    assert set(numbers) == {"images_per_s", "step_ms", "memory_bytes"}
    assert numbers["step_ms"] == pytest.approx(8000 / numbers["images_per_s"])
    assert min(numbers.values()) > 0


def test_the_flat_reduction_averages_all_gradients_in_place() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = torch.nn.Linear(3, 2)
        net(torch.ones(1, 3)).sum().backward()
        before = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        lockstep.average_flat(net, 2)
    finally:
        torch.distributed.destroy_process_group()
    for parameter, gradient in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 2, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "20"], "--steps"),
        (["--ranks", "3", "--batch-size", "8"], "split evenly"),
        (["--threads", "0"], "0"),
    ],
)
def test_lockstep_rejects_what_it_cannot_time(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lockstep.main(words) == InputError.exit_code
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert said in told


def made_rows(options: ScalingOptions) -> dict[str, list[dict[str, float]]]:
    rows = {}
    for variant, ranks in options.pairs():
        milliseconds = 20.0 + ranks
        speed = ranks * options.batch_per_rank / milliseconds * 1000
        rows[name_of(variant, ranks)] = [{"images_per_s": speed, "step_ms": milliseconds}]
    return rows


def made_topic(options: ScalingOptions) -> dict[str, Any]:
    rows = made_rows(options)
    shares = {"independent": 0.9, "lock-step": 0.95}
    points = [
        {"variant": variant, "ranks": ranks, "beyond_cores": ranks > 2, "efficiency": shares, **numbers}
        for variant, ranks in options.pairs()
        for numbers in rows[name_of(variant, ranks)]
    ]
    counted = {"payload_bytes": 100.0, "payload_formula": 100, "bytes_sent": 260.0}
    traffic = [{"engine": RAW_DDP, "ranks": 2, **counted, "data_formula": 100.0, "framing_formula": 144}]
    found = {"scaling": {"cores": 2, "threads": 1, "points": points, "traffic": traffic}}
    return json.loads(json.dumps(found))


def test_the_topic_measures_each_variant_on_each_number_of_ranks() -> None:
    topic = scaling(ScalingOptions())
    names = [measurement.name for measurement in topic.measurements]
    assert len(names) == len(set(names)) == 4 * 4 + 3
    assert name_of(SERVER, 1) not in names
    assert {name for ratio in topic.ratios for name in (ratio.of, ratio.to)} <= set(names)


def test_what_a_step_sends_is_counted_once_for_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ScalingOptions(steps=99)
    trained: list[tuple[str, object]] = []
    monkeypatch.setattr(module, "train", lambda folder, *flags, engine: trained.append((engine, flags[2])))
    monkeypatch.setattr(module.Run, "read", lambda folder: None)
    monkeypatch.setattr(module, "traffic_of", lambda run, engine, collectives: {"engine": engine})
    analyse, rows = scaling(options).analyse, made_rows(options)
    assert analyse
    assert analyse(rows) == analyse(rows)
    assert sorted(trained) == sorted((engine, ranks) for engine in (RAW_DDP, SERVER) for ranks in (2, 4, 8))


def test_the_section_draws_speed_and_efficiency_over_the_ranks(tmp_path: Path) -> None:
    page = bench_page(tmp_path, made_topic(ScalingOptions()))
    assert [each["text"] for each in page.find("h3")][:3] == ["Throughput", "Efficiency", "Bytes of a step"]
    assert "more than cores" in page.text
    legend = [each["text"] for each in page.find("span", "key")]
    assert [key.rsplit(" ", 1)[0] for key in legend[:5]] == list(VARIANTS)
    # 5 variants on 4 numbers of ranks, but no parameter server on one, in both plots.
    assert len(page.find("circle", "dot")) == 2 * 19
    assert [each["text"] for each in page.find("text", "x")] == ["1", "2", "4", "8"] * 2
    assert len(page.find("line", "edge")) == 2
    assert "+6.6" in page.text


def test_the_section_draws_a_single_number_of_ranks(tmp_path: Path) -> None:
    page = bench_page(tmp_path, made_topic(ScalingOptions(ranks=(2,))))
    assert not page.find("polyline")
    assert "more than cores" not in page.text


def test_the_section_escapes_what_it_is_given(tmp_path: Path) -> None:
    topic = made_topic(ScalingOptions())
    page = bench_page(tmp_path, json.loads(json.dumps(topic).replace('"raw_ddp"', '"<script>\'&"')))
    assert "<script>'&" in page.text
    assert "<script>" not in page.content
