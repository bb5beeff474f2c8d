"""`lit-mnist new` creates a project that trains, and whose tests pass."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Command, Completed, start

from lit_mnist import new

Run = Callable[..., Completed]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A new project."""
    new.main(["mine"])
    return tmp_path / "mine"


@pytest.fixture
def run(project: Path, tmp_path: Path) -> Iterator[Run]:
    """`run(*words)`: runs `lit-mnist WORDS` in the project."""
    commands: list[Command] = []

    def run_words(*words: str) -> Completed:
        commands.append(start(list(words), tmp_path / "output", project))
        return commands[-1].wait(120)

    yield run_words
    for command in commands:
        command.kill()


def test_it_trains_resumes_and_tests(project: Path, run: Run) -> None:
    def result() -> dict[str, Any]:
        return json.loads((project / "runs" / "first" / "result.json").read_text())

    completed = run("--config", "config.yaml", "--devices", "2", "--run-dir", "runs/first")
    assert completed.code == 0, completed.output
    trained = result()
    assert trained["test"]["accuracy"] > 0.9
    assert "svg" in (project / "runs" / "first" / "report.html").read_text()

    # On one rank: each sample counts once.
    completed = run("test", "--ckpt", "runs/first", "--devices", "1", "--run-dir", "runs/test")
    assert completed.code == 0, completed.output
    tested = json.loads((project / "runs" / "test" / "result.json").read_text())
    assert tested["test"] == pytest.approx(trained["test"], rel=1e-6)

    completed = run("--resume", "runs/first", "--epochs", "12")
    assert completed.code == 0, completed.output
    assert result()["steps"] == 12 * 24


def test_a_folder_with_files_is_rejected(command: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("mine")
    assert command("new", "mine").code == 2
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["mine"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_its_own_tests_pass(project: Path) -> None:
    subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], cwd=project, check=True, timeout=600)
