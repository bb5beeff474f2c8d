"""A wheel that is built here trains, and its plugins and its doctor run, outside of any checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT

# What the wheel is built from.
SOURCES = ("lit_mnist", "ddp_doctor", "configs", "examples", "pyproject.toml", "README.md")
PLUGIN = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lit_mnist.plugins import VerifiedCheckpointIO

options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
trainer = Trainer(max_steps=2, plugins=[VerifiedCheckpointIO()], **options)
trainer.fit(BoringModel())
trainer.save_checkpoint("saved.ckpt")
import lit_mnist
print(lit_mnist.__file__)
"""


def run(words: list[str], folder: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, in which only the dependencies of this environment are visible."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(source, copy)
    # With --no-index, nothing can come from a registry.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index"]
    source, dist = str(folder / "source"), str(folder / "dist")
    built = run([*pip, "wheel", *options, "--no-build-isolation", "--wheel-dir", dist, source], folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = (folder / "dist").glob("lit_mnist-*.whl")
    made = run([sys.executable, "-m", "venv", "--without-pip", "environment"], folder)
    assert made.returncode == 0, made.stderr
    python = str(folder / "environment" / "bin" / "python")
    done = run([*pip, "--python", python, "install", *options, str(wheel)], folder)
    assert done.returncode == 0, done.stderr
    packages = next((folder / "environment").glob("lib/python*/site-packages"))
    # Python runs no other .pth file of that folder: the editable installation of this checkout stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "environment" / "bin"


def outside() -> dict[str, str]:
    """Returns an environment that does not name the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_command_of_a_wheel_writes_a_project(installed: Path, tmp_path: Path) -> None:
    done = run([str(installed / "lit-mnist"), "new", "mine"], tmp_path, outside())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "mine" / "__init__.py").exists()
    done = run([str(installed / "ddp-doctor"), "--explain", "LD001"], tmp_path, outside())
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_trains_and_its_plugins_and_its_doctor_run_outside_a_checkout(installed: Path, tmp_path: Path) -> None:
    environment = outside()
    environment["PATH"] = os.pathsep.join([str(installed), environment["PATH"]])
    python = str(installed / "python")
    done = run(
        [str(installed / "lit-mnist"), "--devices", "2", "--max-steps", "60", "--run-dir", "run"], tmp_path, environment
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    done = run([python, "-c", PLUGIN], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert str(installed.parent) in done.stdout
    shutil.copy(ROOT / "examples" / "doctor" / "train.py", tmp_path)
    words = ["--only", "LD001", "--timeout", "200", "--", python, "-m", "torch.distributed.run", "--standalone"]
    done = run([str(installed / "ddp-doctor"), *words, "--nproc-per-node", "2", "train.py"], tmp_path, environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "LD001" in done.stdout
