"""Fixtures and helpers of all tests: the command line in forked processes, and access to results."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import ForkedPopen, execv
from prepared import prepare
from processes import ROOT, Done, files_of, forked, on_ranks, processes_of, ranks_of, run_forked, wait_for

from benchmarks.command import main as bench
from lit_mnist.cli.main import main
from lit_mnist.data.dataset import Dataset, load_dataset
from lit_mnist.errors import InputError

__all__ = ["ROOT", "Done", "forked", "on_ranks", "processes_of", "ranks_of", "run_forked", "wait_for"]

pytest_plugins = ["needs", "pytester"]

# Tests use the CPU even if there are GPUs. The GPU tests take the GPUs from this list. The workers of pytest-xdist
# inherit the variable.
_ALL = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
GPUS = [number for number in os.environ.setdefault("LIT_MNIST_TEST_GPUS", _ALL).split(",") if number]
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# What a machine says of its terminal must not decide what a test sees: a CI sets CI, and a shell may set the others.
for _name in ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# Every test that was collected, and whether `make test` runs it.
COLLECTED = pytest.StashKey[dict[str, bool]]()

# This process must not start OpenMP threads, since the tests fork it.
torch.set_num_threads(1)

# The garbage collector would visit the objects of all imports again and again.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Notes the tests before `-m` and `-k` deselect some."""
    config.stash[COLLECTED] = {item.nodeid: item.get_closest_marker("slow") is None for item in items}


def pytest_collection_finish() -> None:
    """Excludes what was imported from garbage collection, here and in each fork."""
    gc.freeze()
    gc.enable()


class Program:
    """Runs the command line in a temporary folder.

    Attributes:
        folder: The folder.
        may_write: Whether a command may write before it ends with exit code 2, as one whose disk is full at a save.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.may_write = False
        self.runs = 0

    def __call__(self, *arguments: object, engine: str = "lightning", timeout: float = 120) -> Done:
        """Runs a command to its end. A rejected command must leave every file as it was."""
        before = files_of(self.folder)
        done = run_forked(self._work(arguments, engine), self.folder, timeout)
        if done.code == InputError.exit_code and not self.may_write:
            after = files_of(self.folder)
            changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
            assert not changed, f"{done.err}a rejected command changed {sorted(changed)}"
        return done

    def started(self, *arguments: object, engine: str = "lightning") -> AbstractContextManager[int]:
        """Starts a command, and yields its process group."""
        return forked(self._work(arguments, engine), self.folder)

    def _work(self, arguments: tuple[object, ...], engine: str) -> Callable[[], int]:
        def work() -> int:
            os.chdir(self.folder)
            words = [str(argument) for argument in arguments]
            return bench(words) if engine == "benchmarks" else main(words, engine=engine)

        return work

    def train(self, *arguments: object, engine: str = "lightning", timeout: float = 240) -> Path:
        """Trains successfully into a new run folder, and returns the folder."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        done = self(*arguments, "--run-dir", folder, engine=engine, timeout=timeout)
        assert done.code == 0, done.out + done.err
        return folder


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each `python` that the test starts be a fork of this process, which has imported torch and Lightning."""
    prepare()
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    monkeypatch.setattr(os, "execv", execv)


@pytest.fixture(scope="session")
def shared_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("shared"))


def result_of(folder: Path) -> dict[str, Any]:
    """Returns a run's `result.json`, which must have the published form."""
    result = dict(json.loads((folder / "result.json").read_text()))
    validator = result_schema()
    if validator is not None:
        validator.validate(result)
    return result


@cache
def result_schema() -> Any:
    """Returns the validator of `result.json`, or None on a machine with GPUs on which the `dev` extra is missing."""
    if find_spec("jsonschema") is None:
        return None
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads((ROOT / "lit_mnist" / "run" / "result.schema.json").read_text()))


def weights_of(folder: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    checkpoint = torch.load(folder / "checkpoints" / name, map_location="cpu", weights_only=True)
    return dict(checkpoint["state_dict"])


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


TIMEOUT = 120
NOBODY = 65534
CHILD_ENV = {**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "*"}


def child(script: str, *args: str, **env: str) -> dict[str, Any]:
    command = [sys.executable, "-c", script, *args]
    environment = {**CHILD_ENV, **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@contextmanager
def as_nobody() -> Iterator[None]:
    """Runs the body as an unprivileged user, since root can read everything.

    This user may not be able to import modules: import them before, as the fixture `embedded` does.
    """
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike the folders of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def embedded() -> Dataset:
    return load_dataset()


def assert_same(first: Dataset, second: Dataset) -> None:
    assert first.sha256 == second.sha256
    for a, b in ((first.train, second.train), (first.test, second.test)):
        torch.testing.assert_close(a.images, b.images, rtol=0, atol=0)
        torch.testing.assert_close(a.labels, b.labels, rtol=0, atol=0)


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
