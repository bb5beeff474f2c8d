"""Engines from a notebook's cell: ranks in processes of their own, whatever the notebook has done before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHILD_ENV

from lit_mnist.errors import InputError
from lit_mnist.notebook import train

CELL = """
import torch
torch.set_num_threads(2)
torch.randn(256, 256) @ torch.randn(256, 256)  # OpenMP's threads run: a fork would hang
from lit_mnist.notebook import compare, train
data = {"train_size": 96, "val_size": 0, "test_size": 50}
result = train("raw_ddp", devices=2, batch_size=32, max_steps=3, settings={"data": data, "model": {"net": "basicnet"}})
assert result["engine"] == "raw_ddp" and result["world_size"] == 2 and result["test"]["count"] == 50
assert result["config"]["model"]["net"] == "basicnet"
found = compare("single,raw_ddp", batch_size=32, max_steps=3, settings={"data": data}, repeats=0, features=False)
assert found["equal"]
try:
    train("raw_ddp", devices=2, batch_size=5)
except ValueError as error:
    assert str(error).startswith("data.batch_size 5 cannot be split evenly"), error
"""


def test_a_cell_trains_and_compares(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELL],
        cwd=tmp_path,
        env=CHILD_ENV,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained   3 steps on 2 ranks" in done.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="Unknown engine 'raw_dpp'"):
        train("raw_dpp")
