"""The doctor in pytest: the marker and `examine_command`."""

from __future__ import annotations

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

# The options of this run are not those of another one.
ENV = {name: value for name, value in CHILD_ENV.items() if name != "PYTEST_ADDOPTS"}
TESTS = """
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(scale):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (ddp if scale == 1 else model)(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


@pytest.mark.ddp_doctor(devices=2, only=["LD009", "LD011"])
def test_averaged():
    train(1)


@pytest.mark.ddp_doctor(devices=2, only=["LD009", "LD011"])
def test_bypassed():
    train(2)


@pytest.mark.ddp_doctor
def test_with_a_fixture(tmp_path):
    pass
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_marked_function_runs_on_each_rank(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENV, timeout=180, check=False)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "LD009" in done.stdout
    assert "functions without fixtures" in done.stdout


def test_a_marked_function_with_a_fixture_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import pytest\n@pytest.mark.ddp_doctor(devices=2)\ndef test_mine(tmp_path): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENV, timeout=60, check=False)
    assert "functions without fixtures" in done.stdout, done.stdout + done.stderr


def test_a_command_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def examine(target: str, **options: object) -> Report:
        seen.append((Path.cwd(), options))
        return Report("torchrun", 2)

    monkeypatch.setattr(ddp_doctor, "examine", examine)
    plugin.examine_command("python 'my train.py'", cwd=tmp_path, timeout=90)
    options = {"command": [str(Path(sys.executable).with_name("python")), "my train.py"], "devices": 2, "timeout": 90}
    assert seen == [(tmp_path, options)]


@pytest.mark.parametrize("said", ["LD012", "no command"])
def test_a_fault_or_a_rejection_fails_the_test(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    def examine(*_: object, **__: object) -> Report:
        if said == "no command":
            raise InputError("There is no command x.")
        return example()

    monkeypatch.setattr(ddp_doctor, "examine", examine)
    with pytest.raises(pytest.fail.Exception, match=said) as raised:
        plugin.examine_command(["x"])
    # The summary of pytest shows the first line.
    assert str(raised.value).splitlines()[0]
