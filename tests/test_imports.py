"""The layout's contract: imports run downward, engines are independent, and a wrong flag is answered without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


def test_imports_run_downward(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--config", ROOT / "pyproject.toml", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_python_without_the_libraries_gets_one_message(tmp_path: Path) -> None:
    # -E -S: without the variables of the environment and without site-packages.
    command = [sys.executable, "-E", "-S", str(ROOT / "train.py"), "--epochs", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: lit_mnist needs the package yaml, which ")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_package_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lit_mnist", "fit", "--epoch", "3"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--epochs" in done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "lit_mnist", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.startswith("usage: lit-mnist ")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--epoch", "3"), 2, "--epochs"),
        (("--learning_rate", "3"), 2, "--lr"),
        (("fit", "--gpus", "2"), 2, "--devices"),
        (("--model.lr", "fast"), 2, "model.lr"),
        (("--trainer.callbacks", "os.system"), 2, "os.system"),
        (("--devices", "0"), 2, "trainer.devices must be at least 1, but is 0"),
        (("fit", "--save-every", "0"), 2, "save_every"),
        (("test", "--ckpt", "missing"), 2, "no run folder or checkpoint at missing"),
        (("--resume", "missing"), 2, "no run folder or checkpoint at missing"),
        (("--resume", "x" * 300), 2, "File name too long"),
        (("--help",), 0, "commands:"),
        (("fit", "--help"), 0, "--trainer.help"),
        (("compare", "--help"), 0, "--engines"),
        (("--version",), 0, "lit_mnist"),
        (("predict", "--help"), 0, "--images"),
        (("fit", "--trainer.help"), 0, "callbacks"),
        (("engine=fabric", "--save-every", "5"), 2, "does not support run.save_every"),
        (("engine=single", "--devices", "2"), 2, "one device"),
        (("engine=parameter_server", "--precision", "16"), 2, "float16"),
        (("engine=with_accelerate", "test", "--ckpt", "x"), 2, "does not support test"),
        (("engine=raw_ddp", "--trainer.callbacks", "RichModelSummary"), 2, "does not support trainer.callbacks"),
    ],
)
def test_what_needs_no_data_imports_no_torch(words: tuple[str, ...], code: int, told: str) -> None:
    script = (
        "import sys; from lit_mnist.cli.main import main; words = sys.argv[1:];"
        "engine = words.pop(0)[7:] if words[0].startswith('engine=') else 'lightning';"
        "code = main(words, engine);"
        "assert not {'torch', 'lightning', 'numpy', 'ddp_doctor'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stdout + done.stderr


def test_public_names_are_imported_at_their_first_use_and_the_plugins_load_no_module_of_the_experiment() -> None:
    script = (
        "import sys, lit_mnist, lit_mnist.plugins as plugins;"
        "assert not {'torch', 'lightning'} & set(sys.modules);"
        "[getattr(plugins, name) for name in plugins.__all__];"
        "own = {name.split('.')[1] for name in sys.modules if name.startswith('lit_mnist.')};"
        "assert {'lightning', 'torchmetrics'} <= set(sys.modules); print(' '.join(sorted(own)));"
        "from lit_mnist import LitClassifier, LitTrainer, MNISTDataModule, compare, train;"
        "assert LitClassifier.__module__ == 'lit_mnist.module' and not hasattr(lit_mnist, 'nothing')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"errors", "distributed", "checkpoint", "profiling", "run", "plugins"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["raw_ddp", "single"])
def test_a_hand_written_engine_does_not_wait_for_the_imports_of_lightning(engine: str, tmp_path: Path) -> None:
    script = (
        "import sys; from lit_mnist.cli.main import main;"
        "code = main(['fit', '--max-steps', '1', '--devices', '1', '--run-dir', 'run', '--data.val_size', '0'], "
        "sys.argv[1]); assert 'torch' in sys.modules; sys.exit(code);"
    )
    command = [sys.executable, "-X", "importtime", "-c", script, engine]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    # Including those of forked ranks.
    imported = re.findall(r"\| *(torch|lightning|torchmetrics|torchvision)$", done.stderr, re.MULTILINE)
    assert set(imported) == {"torch"}
