"""Breaks each promise of docs/promises.md in a copy of the checkout, and runs the tests that must fail for it.

    python tests/mutations/mutate.py                      every mutation, as a Markdown table
    python tests/mutations/mutate.py --only "kill -9"     those with this text in the promise, the file or a test

Each entry of mutations.yaml replaces one place of one file, as a mistake would. Its tests pass in the unchanged copy,
and each of them fails in the changed one. The exit code is 1 if one does not, since nothing else would show that such a
test cannot fail.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ENTRIES = Path(__file__).with_name("mutations.yaml")
LIBRARIES = ("torch", "torchvision", "torchmetrics", "lightning.pytorch.cli", "torch.distributed.run")
_PR_SET_CHILD_SUBREAPER = 36
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".git", ".venv", ".*_cache", "*.egg-info", "build", "runs", "shared")
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Mutation:
    """One mistake, and the tests that must find it.

    Args:
        promise: The first words of a row of docs/promises.md.
        file: The changed file, relative to the root of the repository.
        old: Text that is in the file exactly once.
        new: The text that replaces it.
        tests: Node IDs of pytest; an ID without parameters stands for all of its cases, of which one must fail.
    """

    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.tests, f"{self.promise}: no test"
        files = [test for test in self.tests if "::" not in test]
        assert not files, f"{self.promise}: name the tests of {files[0]}, as path::name"
        assert self.old != self.new, f"{self.promise}: the mutation of {self.file} changes nothing"

    def applied_to(self, root: Path) -> str:
        """Returns the changed text of the file.

        Raises:
            ValueError: The old text is not in the file exactly once.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has the text {self.old!r} {count} times, not once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What became of a test: `passed`, `failed` or `skipped`, and the reason of the last two."""

    state: str
    reason: str = ""


def read_mutations(path: Path = ENTRIES) -> list[Mutation]:
    """Reads the entries in their order."""
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in yaml.safe_load(path.read_text())]


def read_promises(root: Path = ROOT) -> list[str]:
    """Returns the first column of the tables of docs/promises.md, without their headings."""
    lines = (root / "docs" / "promises.md").read_text().splitlines()
    rows = [line.removeprefix("| ").partition(" | ")[0] for line in lines if line.startswith("| ")]
    return [row for row in rows if row != "promise"]


@contextmanager
def mutated(mutation: Mutation, root: Path) -> Iterator[None]:
    """Changes the file of a mutation in the copy at `root`, and restores it at the end."""
    path = root / mutation.file
    before = path.read_bytes()
    _write(path, mutation.applied_to(root).encode())
    try:
        yield
    finally:
        _write(path, before)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    if path.suffix == ".py":
        # Python compares the second of the change and the size, which may be equal.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(tests: tuple[str, ...], root: Path, timeout: float) -> dict[str, Outcome]:
    """Runs tests in the copy at `root`, and returns the outcome of each node ID.

    pytest runs in a fork of this process, which has imported the libraries already.
    """
    scratch = root.parent / "tmp"
    scratch.mkdir()
    # Some tests become another user, who must be able to enter.
    scratch.chmod(0o755)
    report, log = scratch / "report.xml", root.parent / "pytest.log"
    options = ("-q", "-p", "no:cacheprovider", "--timeout", timeout, "--junitxml", report)
    _become_subreaper()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run_pytest([*map(str, options), *tests], root, scratch, log)
    deadline = time.monotonic() + timeout * (len(tests) + 1)
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    _kill_children()
    cases = _cases(report) if report.is_file() else {}
    shutil.rmtree(scratch, ignore_errors=True)
    return {test: _outcome(test, cases, log) for test in tests}


def _run_pytest(words: list[str], root: Path, scratch: Path, log: Path) -> NoReturn:
    """Runs pytest in this forked process, which sees the copy instead of the checkout, and ends it."""
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        # The options of the run that started this one may be unknown in the copy.
        os.environ.pop("PYTEST_ADDOPTS", None)
        os.environ.update(PYTHONPATH=str(root), TMPDIR=str(scratch))
        tempfile.tempdir = None
        sys.path[0] = str(root)
        code = int(pytest.main(words))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _import_libraries() -> None:
    """Imports what nearly all tests import, which takes longer than most tests, and nothing of this project."""
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)


def _become_subreaper() -> None:
    """Makes the processes that the tests leave children of this process."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _kill_children() -> None:
    """Kills the processes that a broken program has left, and those that they leave."""
    while children := children_of(os.getpid()):
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def children_of(parent: int) -> list[int]:
    """Returns the child processes of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(entry.name))
    return found


def _cases(report: Path) -> dict[str, Outcome]:
    """Returns the outcome of each case of a JUnit report by `module.name`."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 (pytest wrote it)
        outcome = Outcome(PASSED)
        for kind, state in (("skipped", SKIPPED), ("failure", FAILED), ("error", FAILED)):
            if (element := case.find(kind)) is not None:
                lines = element.get("message", "").strip().splitlines() or [kind]
                outcome = Outcome(state, lines[0])
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


def _outcome(test: str, cases: dict[str, Outcome], log: Path) -> Outcome:
    path, _, name = test.partition("::")
    full = f"{path.removesuffix('.py').replace('/', '.')}.{name}"
    found = [outcome for case, outcome in cases.items() if case == full or case.startswith(f"{full}[")]
    for state in (FAILED, PASSED, SKIPPED):
        for outcome in found:
            if outcome.state == state:
                return outcome
    lines = log.read_text(errors="replace").strip().splitlines()
    return Outcome(FAILED, "pytest ended without a report: " + " ".join(lines[-1:]))


def judge(mutation: Mutation, root: Path, unchanged: dict[str, Outcome], timeout: float) -> tuple[bool, str]:
    """Returns whether a mutation is found, or cannot be judged on this machine, and the words for the table.

    Args:
        mutation: The mutation.
        root: The copy of the checkout.
        unchanged: The outcomes of the tests in the unchanged copy.
        timeout: Seconds for each test.
    """
    try:
        mutation.applied_to(root)
    except (OSError, ValueError) as error:
        return False, f"**cannot be applied**: {error}"
    for test in mutation.tests:
        if unchanged[test].state == FAILED:
            return False, f"**fails without the mutation**: {unchanged[test].reason}"
    if skipped := [unchanged[test] for test in mutation.tests if unchanged[test].state == SKIPPED]:
        return True, f"not run: {skipped[0].reason.removeprefix('Skipped: ')}"
    with mutated(mutation, root):
        outcomes = run_tests(mutation.tests, root, timeout)
    if survivors := [test for test, outcome in outcomes.items() if outcome.state != FAILED]:
        return False, f"**survives** {', '.join(survivors)}"
    return True, f"found: {outcomes[mutation.tests[0]].reason}"


def _cell(text: str, width: int = 160) -> str:
    short = " ".join(text.split())
    short = short if len(short) <= width else short[: width - 1] + "…"
    return short.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`` {_cell(text, 90)} ``" if text.strip() else "nothing"


def main(words: list[str] | None = None) -> int:
    """Runs the mutations one at a time, and prints their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="mutations with this text in promise, file or test")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each test")
    arguments = parser.parse_args(words)
    chosen = [
        mutation
        for mutation in read_mutations()
        if any(arguments.only in text for text in (mutation.promise, mutation.file, *mutation.tests))
    ]
    if not chosen:
        parser.error(f"no mutation contains {arguments.only!r}")
    defects = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        Path(folder).chmod(0o755)
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_COPIED)
        _import_libraries()
        unchanged = run_tests(
            tuple(dict.fromkeys(test for each in chosen for test in each.tests)), copy, arguments.timeout
        )
        print("| promise | mutation | tests | result |\n|---|---|---|---|", flush=True)
        for mutation in chosen:
            found, result = judge(mutation, copy, unchanged, arguments.timeout)
            defects += not found
            change = f"`{mutation.file}`: {_code(mutation.old)} → {_code(mutation.new)}"
            tests = ", ".join(f"`{test}`" for test in mutation.tests)
            print(f"| {_cell(mutation.promise)} | {change} | {tests} | {_cell(result)} |", flush=True)
    print(f"\n{len(chosen)} mutations, {defects} defects")
    return min(defects, 1)


if __name__ == "__main__":
    sys.exit(main())
