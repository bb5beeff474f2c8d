"""Engines from a notebook's cell: ranks in processes of their own, whatever the notebook has done before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import CHILD_ENV, processes_of, wait_for

from lit_mnist.cli.api import compare, train
from lit_mnist.errors import InputError
from lit_mnist.experiment.registry import NETWORKS, Registered

CELL = """
import torch
torch.set_num_threads(2)
torch.randn(256, 256) @ torch.randn(256, 256)  # OpenMP's threads run: a fork would hang
from lit_mnist.cli.api import compare, train
data = {"train_size": 96, "val_size": 0, "test_size": 50}
"""
TRAINS = """
result = train("raw_ddp", devices=2, batch_size=32, max_steps=3, settings={"data": data, "model": {"net": "basicnet"}})
assert result["engine"] == "raw_ddp" and result["world_size"] == 2 and result["test"]["count"] == 50
assert result["config"]["model"]["net"] == "basicnet"
try:
    train("raw_ddp", devices=2, batch_size=5)
except ValueError as error:
    assert str(error).startswith("data.batch_size 5 cannot be split evenly"), error
else:
    raise AssertionError("not rejected")
"""
COMPARES = """
found = compare("single,raw_ddp", batch_size=32, max_steps=3, settings={"data": data}, repeats=0)
assert found["equal"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", [TRAINS, COMPARES], ids=["trains", "compares"])
def test_a_cell_trains_and_compares(tmp_path: Path, work: str) -> None:
    command = [sys.executable, "-c", CELL + work]
    options = {"cwd": tmp_path, "env": CHILD_ENV, "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run(command, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_an_interrupted_cell_saves_the_run_and_says_how_to_resume(tmp_path: Path) -> None:
    code = "from lit_mnist import train; train('raw_ddp', devices=2, epochs=50, run_dir='run')"
    command = [sys.executable, "-c", code]
    # A notebook sends the signal to the kernel and to all processes that it has started.
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=CHILD_ENV,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            # The file exists before the first step.
            metrics = tmp_path / "run" / "metrics.csv"
            wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, 100)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert "--resume run" in out, err
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()
    assert not processes_of(process.pid)


def test_an_unknown_engine_is_rejected() -> None:
    with pytest.raises(InputError, match="Unknown engine 'raw_dpp'"):
        train("raw_dpp")


@pytest.mark.parametrize(
    ("module", "todo"),
    [("__main__", "write it to a file in this folder"), ("my_parts", "give imports=\\['my_parts'\\]")],
)
def test_a_network_that_the_ranks_would_not_know_is_rejected_at_once(
    monkeypatch: pytest.MonkeyPatch, module: str, todo: str
) -> None:
    def network(num_classes: int) -> None: ...

    network.__module__ = module
    monkeypatch.setitem(NETWORKS, "of_a_cell", Registered("model.net", "of_a_cell", network, frozenset()))
    for function in (train, compare):
        with pytest.raises(InputError, match=f"model.net of_a_cell is registered in this process only.*{todo}"):
            function(settings={"model": {"net": "of_a_cell"}})
