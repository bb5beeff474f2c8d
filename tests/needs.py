"""Skips tests whose requirements the machine does not meet, and reports the promises that remain unproved.

The marker `@pytest.mark.needs("mounts")` states a requirement of a test. With `--require-proofs` any skip that a limit
of the machine does not explain fails the run.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

# The Debian packages of the tools that tests need. .ci/run installs them if possible.
PACKAGES = {
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "hostname": "hostname",
    "ip": "iproute2",
    "mount": "mount",
    "umount": "mount",
    "unshare": "util-linux",
}
# Error messages for requests that this machine does not permit.
_REFUSALS = ("not permitted", "Permission denied", "not supported", "not implemented", "Unknown device type")
_KEY = "lack"


@dataclass(frozen=True)
class Lack:
    """The reason why a machine does not meet a requirement.

    Attributes:
        reason: The reason as text.
        tools: The tools that are not installed.
        expected: Whether the reason is a limit of the machine, and not an unexpected failure of a command.
    """

    reason: str
    tools: tuple[str, ...] = ()
    expected: bool = True


def _missing(what: str, tools: tuple[str, ...]) -> Lack | None:
    missing = tuple(tool for tool in tools if shutil.which(tool) is None)
    if not missing:
        return None
    packages = " ".join(sorted({PACKAGES[tool] for tool in missing}))
    return Lack(f"{what} takes the tools {', '.join(missing)} (apt-get install {packages})", missing)


def _privileged(what: str, tools: tuple[str, ...], probe: Callable[[], list[list[str]]]) -> Lack | None:
    """Runs commands that require root, and returns why they fail, or None."""
    if lack := _missing(what, tools):
        return lack
    if os.geteuid() != 0:
        return Lack(f"{what} takes root")
    for command in probe():
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            told = done.stderr.strip().partition("\n")[0]
            expected = any(refusal in done.stderr for refusal in _REFUSALS)
            return Lack(f"{what} is not possible here ({told or command[0]})", expected=expected)
    return None


def _mounts() -> Lack | None:
    with tempfile.TemporaryDirectory() as place:
        commands = [["mount", "-t", "tmpfs", "none", place], ["umount", place]]
        return _privileged("mounting a file system", ("mount", "umount"), lambda: commands)


def _namespaces() -> Lack | None:
    cable = ["ip", "link", "add", "cable", "type", "veth", "peer", "name", "other"]
    commands = [["unshare", "--uts", "--net", "--mount", *cable]]
    tools = ("hostname", "ip", "mount", "unshare")
    return _privileged("making a machine of namespaces", tools, lambda: commands)


def _browser() -> Lack | None:
    # Google's own package has another name than Debian's.
    browser = () if shutil.which("google-chrome") else ("chromium",)
    return _missing("opening a page", (*browser, "chromedriver"))


def _gpus() -> Lack | None:
    # conftest.py moves the GPUs to this variable.
    return None if os.environ.get("LIT_MNIST_TEST_GPUS") else Lack("this machine has no GPU")


def _ptrace() -> Lack | None:
    return None if platform.system() == "Linux" else Lack("ptrace is Linux's")


_NEEDS = {"browser": _browser, "gpu": _gpus, "mounts": _mounts, "namespaces": _namespaces, "ptrace": _ptrace}


@cache
def lack_of(need: str) -> Lack | None:
    """Returns why this machine does not meet a requirement, or None if it does."""
    return _NEEDS[need]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("proofs")
    group.addoption("--require-proofs", action="store_true", help="fail if a test was skipped that could have run here")
    group.addoption(
        "--cannot-install",
        default="",
        metavar="TOOLS",
        help="comma-separated tools that cannot be installed on this machine",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): requirements on the machine; see tests/needs.py")
    # The workers of pytest-xdist send their reports to the main process.
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(Unproved(config), "unproved")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needs = [name for marker in item.iter_markers("needs") for name in marker.args]
        lacks = [lack for need in needs if (lack := lack_of(need))]
        if lacks:
            item.add_marker(pytest.mark.skip(reason="; ".join(lack.reason for lack in lacks)))
            tools = [tool for lack in lacks for tool in lack.tools]
            # Plain values, since pytest-xdist sends them with the report.
            item.user_properties.append((_KEY, [all(lack.expected for lack in lacks), *tools]))


class Unproved:
    """Collects the skipped tests, reports them at the end, and fails the run if it is required.

    Args:
        config: pytest's configuration.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.skipped: dict[str, list[pytest.TestReport | pytest.CollectReport]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        # An expected failure is reported as skipped, too.
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[reason.removeprefix("Skipped: ")].append(report)

    def could_have_run(self, report: pytest.TestReport | pytest.CollectReport) -> bool:
        """Returns whether a test was skipped without being explained by a limit of this machine."""
        expected, *tools = dict(getattr(report, "user_properties", ())).get(_KEY, [False])
        return not (expected and set(tools) <= set(self.config.getoption("--cannot-install").split(",")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        unexplained = any(self.could_have_run(report) for reports in self.skipped.values() for report in reports)
        if self.config.getoption("--require-proofs") and unexplained and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        count = sum(map(len, self.skipped.values()))
        terminalreporter.section(f"promises that were not proved on this machine: {count}")
        for reason, reports in sorted(self.skipped.items()):
            terminalreporter.line(f"{len(reports)} test{'s' * (len(reports) != 1)}: {reason}")
            failed = self.config.getoption("--require-proofs") and self.could_have_run(reports[0])
            cases = Counter(report.nodeid.partition("[")[0] for report in reports)
            for test, number in cases.items():
                line = f"  {test}" + f" ({number} cases)" * (number > 1) + " FAILED: it could have run" * failed
                terminalreporter.line(line)
