"""The files in `configs` are read by a stock LightningCLI and by the command, and train what they say."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import ROOT
from lightning.pytorch.cli import LightningCLI

from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.module import LitClassifier

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def is_part_of(part: Any, whole: Any) -> bool:
    """Returns whether the whole has all values of a part; the arguments of a class are flat or in `init_args`."""
    if not isinstance(part, dict):
        return bool(part == whole)
    whole = whole.get("init_args", whole)
    return all(name in whole and is_part_of(value, whole[name]) for name, value in part.items())


def read(printed: str) -> dict[str, Any]:
    return yaml.safe_load(printed[printed.index("# lightning.pytorch") :])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_stock_cli_and_the_command_read_it(
    path: Path, capsys: pytest.CaptureFixture[str], command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["fit", "--config", str(path), "--print_config"]
    monkeypatch.setattr(sys, "argv", ["stock.py"])
    with pytest.raises(SystemExit) as end:
        LightningCLI(LitClassifier, MNISTDataModule, args=words)
    assert end.value.code == 0
    content = yaml.safe_load(path.read_text())
    assert is_part_of(content, read(capsys.readouterr().out))

    completed = command(*words)
    assert completed.code == 0, completed.output
    assert is_part_of(content, read(completed.output))


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "accuracy", "tolerance"),
    [("seed", 0.916, 0.004), ("default", 0.991, 0.002), ("speedrun", 0.990, 0.002), ("basicnet", 0.984, 0.006)],
)
def test_its_recipe_reaches_its_accuracy(
    train: Callable[..., dict[str, Any]], name: str, accuracy: float, tolerance: float
) -> None:
    result = train("--config", ROOT / "configs" / f"{name}.yaml", "--devices", 1, timeout=1200)
    assert result["test"]["accuracy"] == pytest.approx(accuracy, abs=tolerance)


SRUN = """#!/bin/bash
# Starts the tasks of one machine, as srun does, and sends SIGTERM to them if $WARN is set.
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NODEID=0 "$@" & pids+=($!); done
if [[ -n ${WARN:-} ]]; then
    until [[ -s runs/slurm-7/metrics.csv ]]; do kill -0 "${pids[@]}" || exit 1; sleep 0.1; done
    kill -TERM "${pids[@]}"
fi
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >> requeued; fi
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_slurm_job_stops_and_resumes(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "lit-mnist",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    words = ["bash", str(ROOT / "configs" / "cluster" / "slurm.sbatch"), "--max-steps", "300", "--precision", "32-true"]

    def run(**more: str) -> int:
        job = subprocess.Popen(words, cwd=tmp_path, env={**environment, **more}, start_new_session=True)
        try:
            return job.wait(240)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)

    assert run(WARN="1") == 128 + signal.SIGTERM
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert not (tmp_path / "runs" / "slurm-7" / "result.json").exists()
    assert run() == 0
    assert (tmp_path / "runs" / "slurm-7" / "result.json").exists()
