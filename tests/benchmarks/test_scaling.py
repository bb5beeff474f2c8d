"""Scaling: each variant is measured on each number of ranks, and the programs to compare with run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import run_forked

from benchmarks import lockstep
from benchmarks.scaling import (
    SERVER,
    ScalingOptions,
    name_of,
    scaling,
)
from lit_mnist.errors import InputError


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


def test_the_topic_measures_each_variant_on_each_number_of_ranks() -> None:
    topic = scaling(ScalingOptions())
    names = [measurement.name for measurement in topic.measurements]
    assert len(names) == len(set(names)) == 4 * 4 + 3
    assert name_of(SERVER, 1) not in names
    assert {name for ratio in topic.ratios for name in (ratio.of, ratio.to)} <= set(names)
