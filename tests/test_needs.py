"""What a machine leaves unproved is reported at the end, and fails the run where it could have been proved."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from needs import PACKAGES

pytestmark = pytest.mark.timeout(60)

CONFTEST = """
import os

import pytest

pytest_plugins = ["needs"]
# Whoever runs these tests.
os.geteuid = lambda: int(os.environ["TEST_UID"])
"""
TESTS = """
import pytest


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("number", [1, 2])
def test_of_two_machines(number):
    pass


@pytest.mark.needs("mounts")
def test_of_a_full_disk():
    pass


def test_of_nothing():
    pass
"""
UNEXPLAINED = """
import pytest


def test_that_gives_up():
    pytest.skip("not today")
"""
WHOLE_FILE = """
import pytest

pytest.skip("not this file", allow_module_level=True)
"""
# What .ci/run and `make` call, beside the tools that the tests need.
BASICS = ("bash", "chmod", "dirname", "make", "sh", "uname")


class Machine:
    """A simulated machine: its tools and their exit codes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.uid = folder, folder / "bin", 0
        self.bin.mkdir()
        for name in BASICS:
            if found := shutil.which(name):
                (self.bin / name).symlink_to(found)
        self.give("id", "echo $TEST_UID")
        (folder / "tests").mkdir()
        (folder / "tests" / "conftest.py").write_text(CONFTEST)
        (folder / "tests" / "test_promises.py").write_text(TESTS)
        shutil.copytree(ROOT / ".ci", folder / ".ci")
        (folder / "Makefile").write_text(f"test:\n\t{sys.executable} -m pytest -p no:cacheprovider\n")

    def give(self, tool: str, script: str) -> None:
        path = self.bin / tool
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def give_all(self, script: str = "exit 0") -> None:
        for tool in PACKAGES:
            self.give(tool, script)

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "PYTHONPATH": str(ROOT / "tests"), "TEST_UID": str(self.uid)}
        words = list(map(str, command))
        return subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=50, check=False
        )

    def pytest(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options)

    def ci(self) -> subprocess.CompletedProcess[str]:
        return self.run(self.bin / "bash", ".ci/run")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_unproved_promises_are_counted_with_their_reason(machine: Machine) -> None:
    machine.give_all()
    machine.uid = 1000
    for options in ((), ("--numprocesses", "2")):
        done = machine.pytest(*options)
        assert done.returncode == 0, done.stdout + done.stderr
        _, _, told = done.stdout.partition("promises that were not proved on this machine: 3 =")
        lines = [line.strip() for line in told.splitlines()]
        assert lines[1:5] == [
            "2 tests: making a machine of namespaces takes root",
            "tests/test_promises.py::test_of_two_machines (2 cases)",
            "1 test: mounting a file system takes root",
            "tests/test_promises.py::test_of_a_full_disk",
        ]
        assert "1 passed, 3 skipped" in done.stdout


def test_all_tests_run_if_the_machine_lacks_nothing(machine: Machine) -> None:
    machine.give_all()
    done = machine.pytest("--require-proofs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "promises that were not proved on this machine: 0 =" in done.stdout
    assert "4 passed" in done.stdout


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_unexplained_skip_fails_the_run_if_proofs_are_required(machine: Machine, processes: int) -> None:
    machine.give_all()
    (machine.folder / "tests" / "test_unexplained.py").write_text(UNEXPLAINED)
    (machine.folder / "tests" / "test_whole_file.py").write_text(WHOLE_FILE)
    options = ("--numprocesses", str(processes))
    done = machine.pytest(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "promises that were not proved on this machine: 2 =" in done.stdout
    done = machine.pytest(*options, "--require-proofs")
    assert done.returncode == 1, done.stdout + done.stderr
    for name in ("test_unexplained.py::test_that_gives_up", "test_whole_file.py"):
        assert f"tests/{name} FAILED: it could have run" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "code"), [("unshare failed: Operation not permitted", 0), ("unshare: unrecognized option '--uts'", 1)]
)
def test_a_probe_that_fails_for_an_unexpected_reason_does_not_explain_a_skip(
    machine: Machine, answer: str, code: int
) -> None:
    machine.give_all()
    machine.give("unshare", f'echo "{answer}" >&2; exit 1')
    done = machine.pytest("--require-proofs")
    assert done.returncode == code, done.stdout + done.stderr
    assert f"2 tests: making a machine of namespaces is not possible here ({answer})" in done.stdout


def installing(machine: Machine, *tools: str) -> str:
    """Returns an `apt-get` that records the requested packages and creates these tools."""
    made = [f"printf '#!/bin/sh\\nexit 0\\n' > {machine.bin / tool}; chmod +x {machine.bin / tool}" for tool in tools]
    asked = f'if [ "$1" = install ]; then echo "$@" >> {machine.folder / "asked"}'
    return "\n".join([asked, *made, "fi"])


def test_ci_installs_the_tools_that_are_missing(machine: Machine) -> None:
    machine.give("apt-get", installing(machine, *PACKAGES))
    done = machine.ci()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert set(PACKAGES.values()) <= set((machine.folder / "asked").read_text().split())


@pytest.mark.parametrize(
    ("uid", "apt", "why"),
    [
        (1000, "exit 0", "installing them takes root"),
        (0, None, "there is no apt-get to install them"),
        (0, "exit 100", "apt-get could not install them"),
    ],
)
def test_ci_reports_the_tools_that_it_cannot_install(machine: Machine, uid: int, apt: str | None, why: str) -> None:
    machine.uid = uid
    if apt:
        machine.give("apt-get", apt)
    done = machine.ci()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"are missing, and {why}" in done.stderr
    assert "promises that were not proved on this machine: 3 =" in done.stdout
    assert "making a machine of namespaces takes the tools hostname, ip, mount, unshare" in done.stdout


def test_ci_fails_if_an_installable_tool_is_missing(machine: Machine) -> None:
    machine.give("apt-get", installing(machine, "hostname", "mount", "umount", "unshare"))
    done = machine.ci()
    assert done.returncode == 2, done.stdout + done.stderr
    assert "takes the tools ip (apt-get install iproute2)" in done.stdout
    assert "test_of_two_machines (2 cases) FAILED: it could have run" in done.stdout
    assert "2 passed, 2 skipped" in done.stdout


def test_ci_fails_with_the_tests(machine: Machine) -> None:
    machine.give_all()
    (machine.folder / "tests" / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    done = machine.ci()
    assert done.returncode == 2, done.stdout + done.stderr
    assert "1 failed, 4 passed" in done.stdout
