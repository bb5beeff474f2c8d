"""The doctor in pytest: the marker and `examine_command`."""

import subprocess
import sys
from pathlib import Path

import pytest
from doctor_support import CHILD_ENV
from example_report import example

import ddp_doctor
import ddp_doctor.pytest as plugin
from ddp_doctor.errors import InputError
from ddp_doctor.findings import Report

TESTS = """
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(averaged):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (ddp if averaged else model)(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


@pytest.mark.ddp_doctor(devices=2, only=["LD009", "LD011"])
def test_averaged():
    train(True)


@pytest.mark.ddp_doctor(devices=2, only=["LD009", "LD011"])
def test_bypassed():
    train(False)
"""
REJECTED = """
import pytest


@pytest.mark.ddp_doctor
def test_with_a_fixture(tmp_path):
    pass
"""


@pytest.mark.parametrize(
    ("tests", "counts", "said"),
    [
        pytest.param(TESTS, "1 failed, 1 passed", "LD009", marks=pytest.mark.slow),
        (REJECTED, "1 failed", "functions without fixtures"),
    ],
)
def test_the_doctor_runs_a_marked_function(tests: str, counts: str, said: str) -> None:
    Path("test_mine.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "test_mine.py"]
    # The options of this run are not those of another one.
    environment = {name: value for name, value in CHILD_ENV.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert counts in done.stdout, done.stdout + done.stderr
    assert said in done.stdout


@pytest.mark.parametrize("said", ["LD012", "no command"])
def test_a_fault_or_a_rejection_fails_the_test(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    def examine(*_: object, **__: object) -> Report:
        if said == "no command":
            raise InputError("There is no command x.")
        return example()

    monkeypatch.setattr(ddp_doctor, "examine", examine)
    with pytest.raises((pytest.fail.Exception, InputError), match=said):
        plugin.examine_command(["x"])
