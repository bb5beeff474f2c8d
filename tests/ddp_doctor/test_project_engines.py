"""The engines of this project, and its template, are healthy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_doctor import examine
from lit_mnist import LitClassifier, MNISTDataModule

SMALL = ("--epochs", "2", "--data.train_size", "512", "--data.val_size", "100", "--data.test_size", "100")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENGINES = ("raw_ddp", "lightning", "fabric", "with_accelerate", "with_hf_trainer")


class Data(MNISTDataModule):
    def __init__(self) -> None:
        super().__init__(train_size=512, val_size=101, test_size=100)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("forked_python")
def test_the_template_is_healthy() -> None:
    report = examine(LitClassifier, Data)
    assert not report.faults, report.faults
    assert report.exit_code == 0, report.error + report.hang


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_is_healthy(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("-m", f"lit_mnist.engines.{engine}", *SMALL, "--precision", "32-true")
    report = examine(command=(*TORCHRUN, *words), only=["structural"], timeout=120)
    assert not report.faults, report.faults
    assert report.exit_code == 0, report.error + report.hang
