"""Runs commands on hostile input, with limited resources and with a module that they must not import."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import run_forked

from faults.conftest import write_metric
from faults.hostile import CANARY
from lit_mnist.cli.main import main
from lit_mnist.errors import InputError
from lit_mnist.predict.trained import load

# Imported once, before the fork: they take each process seconds.
for _name in ("cli.run", "cli.experiment_target", "cli.user_target", "engines.lightning", "export.command"):
    importlib.import_module(f"lit_mnist.{_name}")

_MOST_SECONDS = 10
_MOST_KB = 400 << 10
# The largest memory growth and the longest time of all cases so far.
PEAKS: dict[str, tuple[float, str]] = {}
MEASURED_CASES: list[str] = []


@dataclass(frozen=True)
class Ended:
    """How a command with limited resources ended."""

    code: int
    out: str
    err: str
    seconds: float
    peak_kb: int


Commands = list[tuple[object, ...]]


def limited(cases: dict[str, Commands], folder: Path) -> dict[str, list[Ended]]:
    """Runs command lines in one forked process with limited resources, with a module that they must not import.

    For every second command torch's variable allows to load any content.

    Args:
        cases: Command lines; those of a case run in the folder of its name.
        folder: Holds those folders.
    """

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_CPU, (200, 200))
        # Relative to the current size. A command that exhausts the memory ends only this process.
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (3 << 30),) * 2)
        found = {}
        for case, commands in cases.items():
            (folder / "case.txt").write_text(case)
            os.chdir(folder / case)
            Path("canary_module.py").write_text(CANARY)
            Path("user_module.py").write_text("from lightning.pytorch import LightningModule as Lit\n")
            sys.path.insert(0, str(folder / case))
            found[case] = [_ended(command, force=number % 2 == 1) for number, command in enumerate(commands)]
            sys.path.pop(0)
            # Import the module now, since a module is imported only once.
            assert not Path("imported").exists(), case
            assert not Path("executed").exists(), case
            assert not [path for path in Path().glob("*.*") if path.suffix in {".safetensors", ".onnx", ".pt2"}], case
        (folder / "ended.json").write_text(json.dumps(found))
        return 0

    for case in cases:
        (folder / case).mkdir(exist_ok=True)
    done = run_forked(work, folder, timeout=240)
    assert done.code == 0, ((folder / "case.txt").read_text(), done.out + done.err)
    found = json.loads((folder / "ended.json").read_text())
    return {case: [Ended(*values) for values in found[case]] for case in found}


def _ended(command: tuple[object, ...], *, force: bool) -> tuple[int, str, str, float, int]:
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = str(int(force))
    out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
    # The peak counts from here.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_kb()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _load(Path(str(command[1]))) if command[0] == "load" else main([str(word) for word in command])
    return code, out.getvalue(), err.getvalue(), time.monotonic() - began, _peak_kb() - before


def _load(checkpoint: Path) -> int:
    """Loads a checkpoint in Python, and ends as the command does."""
    try:
        load(checkpoint)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _peak_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def assert_rejected_safely(found: dict[str, list[Ended]], *parts: str) -> None:
    for case, commands in found.items():
        for ended in commands:
            assert ended.code == 2, (case, ended)
            assert "Traceback" not in ended.out + ended.err, (case, ended)
            # It must be rejected before it runs out of memory.
            assert "MemoryError" not in ended.out + ended.err, (case, ended)
            assert ended.err.startswith("error: "), (case, ended)
            assert len(ended.err.strip().splitlines()) == 1, (case, ended)
            assert all(part in ended.err for part in parts), (case, ended)
            assert ended.seconds < _MOST_SECONDS, (case, ended)
            assert ended.peak_kb < _MOST_KB, (case, ended)
            for what, value in (("seconds", ended.seconds), ("peak_kb", float(ended.peak_kb))):
                PEAKS[what] = max(PEAKS.get(what, (0.0, "")), (value, case))
        MEASURED_CASES.append(case)


def reading(checkpoint: Path) -> Commands:
    """Returns the commands that read a checkpoint. The last one reads it as that of a run folder."""
    folder = checkpoint.parent / "given"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").symlink_to(checkpoint)
    return [
        ("test", "--ckpt", checkpoint),
        ("predict", "--ckpt", checkpoint),
        ("--resume", checkpoint),
        ("export", "--ckpt", checkpoint),
        ("load", checkpoint),
        ("load", folder),
        ("fit", "--model", "user_module.Lit", "--import", "user_module", "--resume", checkpoint),
        ("test", "--model", "user_module.Lit", "--import", "user_module", "--ckpt", folder),
        ("--resume", folder),
    ]


def parts(cases: Iterable[str]) -> list[list[str]]:
    """Groups cases that share a process, since a fork takes longer than most cases."""
    names = list(cases)
    return [names[first : first + 12] for first in range(0, len(names), 12)]


def slug(name: str) -> str:
    return name.replace("/", "-")


def measurements(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints after the tests of a file how close its cases came to the limits."""
    PEAKS.clear()
    MEASURED_CASES.clear()
    yield
    if PEAKS:
        (seconds, slowest), (peak, largest) = PEAKS["seconds"], PEAKS["peak_kb"]
        limits = f"at most {seconds:.1f} s ({slowest}) and {peak / 1024:.0f} MB ({largest})"
        write_metric(f"rejected in {request.path.name}", f"{len(MEASURED_CASES)} cases, {limits}")
