"""The doctor in tests: `examine_command`, and what pytest knows by itself: a marker and a fixture of one function.

from ddp_doctor.pytest import examine_command


def test_the_script_has_no_silent_fault():
    examine_command("torchrun --nproc-per-node 2 train.py --epochs 1")


@pytest.mark.ddp_doctor(devices=2)
def test_the_loop_has_no_silent_fault():
    train(epochs=1)  # the doctor runs this function on each rank

Importing this module imports no torch.
"""

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_doctor.findings import Report
from ddp_doctor.output.terminal import report_text


def examine_command(command: str | Sequence[str], *, cwd: str | os.PathLike[str] = ".", **options: Any) -> Report:
    """Examines a command, and fails the test if it has a fault.

    In a test of a project with a training script:

        report = examine_command("torchrun --standalone --nproc-per-node 2 train.py", only=["LD009"])

    Args:
        command: The command as one text or as its words. Programs of the environment that runs the test come first.
        cwd: The folder in which it runs.
        options: Further arguments of `ddp_doctor.examine`, such as `devices`.

    Returns:
        The report, such as for `assert report.comparison.made`.
    """
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    own = Path(sys.executable).with_name(words[0]) if words else Path()
    if words and os.sep not in words[0] and own.is_file():
        words[0] = str(own)
    with contextlib.chdir(cwd):
        return _examined(command=words, **options)


def _examined(target: str = "", **options: Any) -> Report:
    """Returns the report; the test fails if the exit code of the doctor would not be 0."""
    from ddp_doctor import examine

    report: Report = examine(target, **options)
    if report.exit_code:
        # The summary of pytest shows the first line.
        pytest.fail(report_text(report).strip(), pytrace=False)
    return report


@pytest.fixture
def assert_same_on_ranks() -> Any:
    """`ddp_doctor.testing.assert_same_on_ranks`: a loss, a step or a metric computes the same on several ranks."""
    from ddp_doctor.testing import assert_same_on_ranks

    return assert_same_on_ranks


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker."""
    text = "ddp_doctor(devices=2, **options): run this function on each rank under the doctor; it fails with a fault"
    config.addinivalue_line("markers", text)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Lets the doctor run a marked function on each rank, in place of pytest."""
    marker = pyfuncitem.get_closest_marker("ddp_doctor")
    if marker is None:
        return None
    if pyfuncitem.cls is not None or pyfuncitem.fixturenames or pyfuncitem.originalname != pyfuncitem.name:
        needs = "functions without fixtures, parameters and classes: the ranks import them by their name"
        pytest.fail(f"The marker ddp_doctor is for {needs}.", pytrace=False)
    _examined(f"{pyfuncitem.path}:{pyfuncitem.name}", *marker.args, **marker.kwargs)
    return True
