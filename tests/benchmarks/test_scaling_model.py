"""Scaling: the model finds what it was made of, the formulas count what is sent, and the yardsticks run."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, run_forked
from test_report import Page

from benchmarks import lockstep
from benchmarks import scaling as module
from benchmarks.model import Point, StepModel, errors, expected_largest, fit, held_out_errors
from benchmarks.pages.scaling import scaling_section
from benchmarks.scaling import RAW_DDP, SERVER, ScalingOptions, model_of, name_of, scaling, traffic_of, workloads
from benchmarks.workload import Collective, Workload
from lit_mnist.comparison.equality import Run
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.models.build import build_net
from lit_mnist.report.page import frame
from lit_mnist.report.style import COMPARISON_STYLE

MACHINE = {"cores": 2, "threads": 1}
TRUTH = StepModel({"bare": 4e-4, "engine": 5e-4}, wait=2e-3, per_round=3e-5, per_byte=2e-9, **MACHINE)
BARE = Workload("bare", "bare", 64)
STEP = Workload("step", "bare", 64, [Collective("all_reduce", 4)])
GRADIENT = Workload("gradient", "bare", 64, [Collective("all_reduce", 4_000_000)])
SMALL = [Collective("exchange", 132), Collective("exchange", 128)] * 2
ENGINE = Workload("engine", "engine", 64, [*SMALL, Collective("all_reduce", 4_000_000)])
SERVERS = Workload("servers", "engine", 64, [*SMALL, Collective("server", 4_000_000)])
WORKLOADS = (BARE, STEP, GRADIENT, ENGINE, SERVERS)
ETHERNET = {"bandwidth_bytes_per_s": 1.25e9, "latency_s": 2e-5}


def made_of(truth: StepModel, workloads: Sequence[Workload] = WORKLOADS, noise: float = 0.0) -> list[Point]:
    pairs = itertools.product(workloads, (1, 2, 4, 8))
    return [
        Point(workload, ranks, truth.step_seconds(workload, ranks) * (1 + noise * (-1) ** n))
        for n, (workload, ranks) in enumerate(pairs)
    ]


@pytest.fixture(scope="module")
def loads() -> dict[str, Workload]:
    return workloads(build_net(Experiment().model, num_classes=10, seed=0), 64)


def test_the_model_finds_the_coefficients_that_the_points_were_made_of() -> None:
    points = made_of(TRUTH)
    found = fit(points, **MACHINE)
    assert found.compute == pytest.approx(TRUTH.compute, rel=1e-9)
    assert (found.wait, found.per_round, found.per_byte) == pytest.approx((2e-3, 3e-5, 2e-9), rel=1e-6)
    assert max(map(abs, errors(found, points))) < 1e-9
    held_out = held_out_errors(points, lambda point: point.ranks, **MACHINE)
    assert held_out == pytest.approx([0.0] * len(points), abs=1e-6)


def test_noise_makes_no_coefficient_negative_and_shows_more_where_points_are_held_out() -> None:
    points = made_of(StepModel({"bare": 4e-4, "engine": 5e-4}, 0.0, 0.0, 0.0, **MACHINE), noise=0.05)
    found = fit(points, **MACHINE)
    assert min(*found.compute.values(), found.wait, found.per_round, found.per_byte) >= 0
    held_out = held_out_errors(points, lambda point: (point.workload.name, point.ranks), **MACHINE)
    seen = [abs(error) for error in held_out if error is not None]
    assert len(seen) == len(points)
    assert sum(seen) > sum(map(abs, errors(found, points)))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_predictions_grow_with_ranks_and_shrink_with_the_network(workload: Workload) -> None:
    ranks = [2**power for power in range(11)]
    steps = [TRUTH.predict(workload, each, **ETHERNET) for each in ranks]
    assert [step.ranks for step in steps] == ranks
    for before, after in itertools.pairwise(steps):
        assert before.seconds <= after.seconds
        assert 1 >= before.efficiency >= after.efficiency > 0
    assert steps[0].efficiency == 1
    faster = TRUTH.predict(workload, 64, bandwidth_bytes_per_s=1e11, latency_s=1e-6).seconds
    assert faster < steps[6].seconds or not workload.collectives


def test_a_prediction_is_the_sum_of_its_parts() -> None:
    found = TRUTH.predict(GRADIENT, 4, **ETHERNET).seconds
    moved = 2 * 3 / 4 * 4_000_000
    by_hand = 64 * 4e-4 + 2e-3 * expected_largest(4) + 6 * (3e-5 + 2e-5) + moved * (2e-9 + 1 / 1.25e9)
    assert found == pytest.approx(by_hand, rel=1e-12)


def test_the_expected_largest_of_normal_numbers() -> None:
    # Harter, Expected values of normal order statistics, 1961.
    known = {1: 0.0, 2: 0.56419, 4: 1.02938, 8: 1.42360, 100: 2.50759}
    assert {count: expected_largest(count) for count in known} == pytest.approx(known, abs=1e-4)


def test_a_server_moves_more_than_a_ring_from_three_ranks_on() -> None:
    ring, server = Collective("all_reduce", 1200), Collective("server", 1200)
    assert [ring.sent(ranks) for ranks in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
    assert [server.sent(ranks) for ranks in (1, 2, 3, 4)] == [0, 1200, 2400, 3600]
    exchange = Collective("exchange", 1200)
    waits = [[each.hops(ranks) for ranks in (1, 2, 3, 4)] for each in (ring, server, exchange)]
    assert waits == [[0, 2, 4, 6], [0, 2, 2, 2], [0, 1, 1, 1]]


def test_too_few_points_are_refused() -> None:
    points = made_of(TRUTH)
    with pytest.raises(InputError, match="needs more than 5 points, not 5"):
        fit([*points[:3], *points[-2:]], **MACHINE)
    alike = made_of(TRUTH, (BARE,))
    with pytest.raises(InputError, match="too much alike"):
        fit(alike * 2, **MACHINE)
    assert held_out_errors(points[:5], lambda point: point.ranks, **MACHINE) == [None] * 5


def test_nonsense_is_not_predicted() -> None:
    unknown = Workload("other", "other", 64)
    with pytest.raises(InputError, match="Nothing was measured of 'other'"):
        TRUTH.predict(unknown, 2, **ETHERNET)
    for ranks, bandwidth in ((0, 1e9), (2, 0.0)):
        with pytest.raises(InputError, match="at least one rank"):
            TRUTH.predict(BARE, ranks, bandwidth, 1e-6)


@pytest.mark.parametrize(("engine", "ranks"), [("raw_ddp", 2), ("raw_ddp", 3), ("parameter_server", 2)])
def test_the_formulas_count_what_a_rank_sends(
    shared_program: Program, loads: dict[str, Workload], engine: str, ranks: int
) -> None:
    sizes = ("--batch-size", 12, "--data.train_size", 240, "--data.val_size", 0, "--max-steps", 9)
    flags = ("--devices", ranks, *sizes, "--run.threads", 1, "--precision", "32-true", "--run.trace", "traffic")
    shared_program.runs += 1
    folder = shared_program.folder / f"scaling-{engine}-{ranks}"
    done = shared_program("fit", *flags, "--run-dir", folder, engine=engine)
    assert done.code == 0, done.out + done.err
    found = traffic_of(Run.read(folder), loads[engine])
    # Beside each step's own, now and then a few numbers are agreed on.
    assert found["payload_formula"] <= found["payload_bytes"] <= found["payload_formula"] + 200
    assert found["payload_bytes"] == pytest.approx(found["payload_formula"], rel=0.002)
    if found["bytes_sent"] is not None and engine == RAW_DDP:
        assert found["bytes_sent"] == pytest.approx(found["data_formula"] + found["framing_formula"], rel=0.02)


@pytest.mark.parametrize("mode", ["", "--independent", "--ddp", "--flat"])
def test_each_yardstick_runs(tmp_path: Path, mode: str) -> None:
    words = ["--ranks", "2", "--batch-size", "8", "--steps", "24", "--threads", "1", "--precision", "32-true"]
    done = run_forked(lambda: lockstep.main([*words, *mode.split()]), tmp_path)
    assert done.code == 0, done.err
    figures = json.loads(done.out.splitlines()[-1])
    assert set(figures) == {"images_per_s", "step_ms", "memory_bytes"}
    assert figures["step_ms"] == pytest.approx(8000 / figures["images_per_s"])
    assert min(figures.values()) > 0


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
def test_a_yardstick_refuses_what_it_cannot_time(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lockstep.main(words) == InputError.exit_code
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert said in told


def made_rows(options: ScalingOptions, loads: dict[str, Workload]) -> dict[str, list[dict[str, float]]]:
    truth = StepModel({load.loop: 4e-4 for load in loads.values()}, 2e-3, 3e-5, 2e-9, **MACHINE)
    rows = {}
    for variant, ranks in options.pairs():
        seconds = truth.step_seconds(loads[variant], ranks)
        speed = ranks * options.batch_per_rank / seconds
        rows[name_of(variant, ranks)] = [{"images_per_s": speed, "step_ms": 1000 * seconds}]
    return rows


def made_topic(options: ScalingOptions, loads: dict[str, Workload]) -> dict[str, Any]:
    rows = made_rows(options, loads)
    shares = {"independent": 0.9, "lock-step": 0.95}
    points = [
        {"variant": variant, "ranks": ranks, "beyond_cores": ranks > 2, "efficiency": shares, **figures}
        for variant, ranks in options.pairs()
        for figures in rows[name_of(variant, ranks)]
    ]
    counted = {"payload_bytes": 100.0, "payload_formula": 100, "bytes_sent": 260.0}
    traffic = [{"engine": RAW_DDP, "ranks": 2, **counted, "data_formula": 100.0, "framing_formula": 144}]
    model = model_of(options, loads, rows, cores=2)
    return json.loads(
        json.dumps({"scaling": {"cores": 2, "threads": 1, "points": points, "traffic": traffic, "model": model}})
    )


def page_of(topic: dict[str, Any]) -> Page:
    page = Page(frame("Scaling", scaling_section(topic), COMPARISON_STYLE))
    assert page.balanced
    assert not {"script", "link"} & {each["tag"] for each in page.elements if each["attrs"].get("rel") != "icon"}
    assert "None" not in page.text
    return page


def test_the_topic_measures_each_variant_on_each_number_of_ranks() -> None:
    topic = scaling(ScalingOptions())
    names = [measurement.name for measurement in topic.measurements]
    assert len(names) == len(set(names)) == 4 * 4 + 3
    assert name_of(SERVER, 1) not in names
    assert {name for ratio in topic.ratios for name in (ratio.of, ratio.to)} <= set(names)


def test_what_a_step_sends_is_counted_once_for_all_rounds(
    loads: dict[str, Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ScalingOptions(steps=99)
    trained: list[tuple[str, object]] = []
    monkeypatch.setattr(module, "train", lambda folder, *flags, engine: trained.append((engine, flags[2])))
    monkeypatch.setattr(module.Run, "read", lambda folder: None)
    monkeypatch.setattr(module, "traffic_of", lambda run, load: {"engine": load.name})
    analyse, rows = scaling(options).analyse, made_rows(options, loads)
    assert analyse
    assert analyse(rows) == analyse(rows)
    assert sorted(trained) == sorted((engine, ranks) for engine in (RAW_DDP, SERVER) for ranks in (2, 4, 8))


def test_the_section_says_what_was_measured_and_what_is_predicted(loads: dict[str, Workload]) -> None:
    topic = made_topic(ScalingOptions(), loads)
    page = page_of(topic)
    assert [each["text"] for each in page.find("h3")] == [
        *("Throughput", "Efficiency", "Model of a step", "Step time, prediction", "Efficiency, prediction"),
        "Bytes of a step",
    ]
    assert "more than cores" in page.text
    predicted = [each["text"] for each in page.find("span", "key") if "predicted" in each["text"]]
    assert len(predicted) == 2 * 5
    assert "1,024" in page.text
    # Three measured points of raw DDP lie on the predicted image.
    drawn = [each["text"] for each in page.find("title") if "measured here" in each["text"]]
    assert len(drawn) == 3
    assert "+6.6" in page.text


def test_the_section_renders_with_whatever_is_missing(loads: dict[str, Workload]) -> None:
    few = made_topic(ScalingOptions(ranks=(2,)), loads)
    assert "No model was fitted" in page_of(few).text
    topic = made_topic(ScalingOptions(), loads)
    found = topic["scaling"]
    for variant in ("independent", RAW_DDP, SERVER):
        points = [point for point in found["points"] if point["variant"] != variant]
        page_of({"scaling": found | {"points": points}})
    for name in found:
        for hole in ({key: value for key, value in found.items() if key != name}, found | {name: None}):
            page_of({"scaling": hole})
    for name in found["model"]:
        page_of({"scaling": found | {"model": found["model"] | {name: None}}})
    hollow = [dict.fromkeys(point) for point in found["points"]]
    page_of({"scaling": found | {"points": hollow}})
    one = [found["points"][0]]
    assert "Throughput" in page_of({"scaling": found | {"points": one}}).text
    for nothing in ({}, {"scaling": None}, {"scaling": {}}):
        assert page_of(nothing).text == "No scaling was measured."


def test_the_section_escapes_what_it_is_given(loads: dict[str, Workload]) -> None:
    topic = made_topic(ScalingOptions(), loads)
    hostile = json.loads(re.sub(r'"(raw_ddp|lock-step|bare loop)"', '"<script>\\\\"\\1\'&"', json.dumps(topic)))
    page = page_of(hostile)
    assert "<script>" in page.text
    assert "<script>" not in page.content
