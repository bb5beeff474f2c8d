"""Fixtures: ranks of a process group, the project's command, and the results of finished runs."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Command, Completed, run_ranks, start


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no test write into the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """`ranks(n, function, *args, timeout=60)`: what the function returns in each of n ranks of a gloo group."""
    numbers = itertools.count()

    def run(count: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        return run_ranks(function, count, args, tmp_path / f"ranks-{next(numbers)}", timeout)

    return run


@pytest.fixture
def start_command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """`start_command(*words)`: starts `python train.py WORDS` in the test's folder; see `launching.Command`.

    With `-m MODULE` as the first words, it starts the main function of that module.
    """
    commands: list[Command] = []

    def begin(*words: object, **environment: str) -> Command:
        output = tmp_path / f"output-{len(commands)}"
        commands.append(start([str(word) for word in words], output, tmp_path, environment))
        return commands[-1]

    yield begin
    for command in commands:
        command.kill()


@pytest.fixture
def command(start_command: Callable[..., Command]) -> Callable[..., Completed]:
    """`command(*words, timeout=120)`: runs `python train.py WORDS` in the test's folder; returns code and output."""

    def run(*words: object, timeout: float = 120, **environment: str) -> Completed:
        return start_command(*words, **environment).wait(timeout)

    return run


@pytest.fixture
def train(command: Callable[..., Completed], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`train(*words)`: runs a command in a run folder of its own, and returns its result.json; it must succeed."""
    numbers = itertools.count()

    def run(*words: object, run_dir: Path | None = None, timeout: float = 120) -> dict[str, Any]:
        folder = run_dir or tmp_path / f"run-{next(numbers)}"
        completed = command(*words, "--run-dir", folder, timeout=timeout)
        assert completed.code == 0, completed.output
        return json.loads((folder / "result.json").read_text())

    return run
