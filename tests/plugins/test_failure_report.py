"""FailureReport: the first failed rank is named with its samples, under each launcher, and nothing hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from processes import ROOT, named, run_forked
from torch.distributed import DistStoreError
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist.plugins import ExactCheckpoint, FailureReport
from lit_mnist.plugins.failure_report import _advice

_SCRIPT = """
import sys, warnings, torch
warnings.filterwarnings("ignore")
from pathlib import Path
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from lit_mnist.plugins import ExactCheckpoint, FailureReport

folder, world_size, failed_rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == failed_rank:
            raise ValueError(f"bad samples {(batch[0][:, 0] / 2).int().tolist()}")
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(64.0).reshape(32, 2)), 2)

if __name__ == "__main__":
    Trainer(
        max_epochs=1, accelerator="cpu", devices=world_size, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ExactCheckpoint(folder, 2), FailureReport(folder)],
    ).fit(Module())
"""


def _run(tmp_path: Path, launcher: list[str], world_size: int, failing: int) -> tuple[dict[str, Any], str]:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(textwrap.dedent(_SCRIPT))
    command = [sys.executable, *launcher, str(script), str(folder), str(world_size), str(failing)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode, done.stderr
    assert not named(folder), "processes left"
    return json.loads((folder / "failure.json").read_text()), done.stderr


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [([], 1), ([], 2), (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2)],
    ids=["one process", "subprocess launcher", "torchrun"],
)
def test_the_first_failed_rank_is_reported(launcher: list[str], world_size: int, tmp_path: Path) -> None:
    failing = world_size - 1
    report, err = _run(tmp_path, launcher, world_size, failing)
    assert (report["rank"], report["world_size"], report["lost_peer"]) == (failing, world_size, False)
    assert (report["stage"], report["epoch"], report["step"], report["batch"]) == ("train", 0, 3, 3)
    indices = report["samples"]["indices"]
    assert len(indices) == 2
    assert report["exception"] == f"ValueError: bad samples {indices}"
    assert report["checkpoint"] == str(tmp_path / "run" / "last.ckpt")
    assert str(tmp_path / "train.py") in report["command"]
    assert ("torchrun" in report["command"]) == bool(launcher)
    assert err.count("failed in epoch 0, step 3 (train batch 3)") == 1, err
    assert f"To resume from {report['checkpoint']}" in err


class Module(LightningModule):
    """Fails at a batch, and tells which samples it has."""

    # Of the class: a resume restores the attributes of the module.
    fails_at = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if (self.trainer.current_epoch, batch_idx) == divmod(self.fails_at, 8):
            raise ValueError(f"bad samples {(batch[0][:, 0] / 2).int().tolist()}")
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("exact", [False, True], ids=["ModelCheckpoint", "ExactCheckpoint"])
def test_the_samples_after_a_resume_within_an_epoch(exact: bool, tmp_path: Path) -> None:
    """A stock Trainer trains the epoch from its first batch again, but counts the batches on."""

    def work() -> int:
        for fails_at in (3, 6, 11):
            Module.fails_at = fails_at
            data = TensorDataset(torch.arange(64.0).reshape(32, 2))
            save = ModelCheckpoint(tmp_path, "last", every_n_train_steps=2)
            trainer = Trainer(
                max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                enable_model_summary=False, default_root_dir=tmp_path,
                callbacks=[ExactCheckpoint(tmp_path, 2) if exact else save, FailureReport(tmp_path)],
            )  # fmt: skip
            last = tmp_path / "last.ckpt"
            loader, resumed = DataLoader(data, 4), last if last.exists() else None
            with pytest.raises(ValueError, match="bad samples"):
                trainer.fit(Module(), loader, ckpt_path=resumed, weights_only=True)
            report = json.loads((tmp_path / "failure.json").read_text())
            assert report["exception"] == f"ValueError: bad samples {report['samples']['indices']}"
            assert (report["epoch"], report["batch"]) == divmod(fails_at, 8)
        return 0

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.out + done.err


def test_a_lost_connection_is_never_the_first_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that raises an error may write it later than a rank that only loses its connection to it."""
    report = FailureReport(tmp_path)
    errors = (
        DistStoreError("the other rank has exited"),
        ValueError("the cause"),
        ZeroDivisionError(),
        DistStoreError(),
    )
    for rank, error in enumerate(errors):
        trainer: Any = SimpleNamespace(
            global_rank=rank, world_size=4, is_global_zero=rank == 0, current_epoch=0, global_step=3, callbacks=[]
        )
        report.on_exception(trainer, LightningModule(), error)
    written = json.loads((tmp_path / "failure.json").read_text())
    assert (written["rank"], written["exception"], written["lost_peer"]) == (1, "ValueError: the cause", False)
    told = capsys.readouterr().err
    assert "Rank 1 of 4" in told
    assert "Rank 2 of 4" not in told
    assert "Rank 3 lost its connection to another rank" in told
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]


@pytest.mark.parametrize(
    ("checkpoint", "exception", "advice"),
    [
        (None, "ValueError: no", "To start again"),
        ("runs/last.ckpt", "ValueError: no", "To resume from runs/last.ckpt"),
        (
            "runs/last.ckpt",
            "InputError: runs/last.ckpt is damaged: other bytes. Use another checkpoint of the run.",
            "To resume, pass another checkpoint of runs as ckpt_path",
        ),
    ],
)
def test_a_damaged_checkpoint_is_not_recommended(checkpoint: str | None, exception: str, advice: str) -> None:
    assert _advice(checkpoint, exception) == advice
