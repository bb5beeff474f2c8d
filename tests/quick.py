"""Checks what has changed since main in about a minute: `make quick`.

It runs ruff, a short run of the main job on two ranks, and the tests that concern the changed files. After a minute no
further test begins. Those of changed test files come first. `make test` runs all.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 60.0
# Tests of files by the longest beginning of their paths. For the GENERAL ones, the folder of tests of the same name is
# chosen instead, if there is one: a helper of tests has its own folder.
_TESTS = {
    "configs/": ("tests/cli/test_configs.py",),
    "ddp_doctor/": ("tests/ddp_doctor/test_checks.py", "tests/ddp_doctor/test_properties.py"),
    "ddp_doctor/checks/": (
        "tests/ddp_doctor/test_checks.py",
        "tests/ddp_doctor/test_doctor_report.py::test_the_documented_checks_are_those_of_the_package",
        "tests/ddp_doctor/test_command.py::test_every_check_explains_itself",
    ),
    "ddp_doctor/emulation/": ("tests/ddp_doctor/test_emulation.py",),
    "ddp_doctor/files/": ("tests/ddp_doctor/test_files.py",),
    "ddp_doctor/output/": ("tests/ddp_doctor/test_formats.py", "tests/ddp_doctor/test_drawings.py"),
    "ddp_doctor/watch/": ("tests/ddp_doctor/test_watch.py",),
    "docs/": ("tests/docs/test_site.py", "tests/docs/test_words.py", "tests/repository"),
    "docs/promises.md": ("tests/mutations", "tests/docs/test_words.py"),
    "examples/": ("tests/examples",),
    "lit_mnist/": ("tests/test_template.py", "tests/test_trainers.py"),
    "lit_mnist/plugins/": ("tests/docs/test_docstrings.py", "tests/docs/test_site.py", "tests/plugins"),
    "lit_mnist/template/": ("tests/cli/test_new.py",),
    "mkdocs.yml": ("tests/docs/test_site.py",),
    "": ("tests/repository",),
}
_GENERAL = ("lit_mnist/", "")


class TimeLimit:
    """Leaves out the tests that would begin after a time.

    Args:
        seconds: The time.

    Attributes:
        left: How many tests were left out.
    """

    def __init__(self, seconds: float) -> None:
        self._end, self.left = time.monotonic() + seconds, 0

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Tells pytest that nothing is left to do for a test that comes too late."""
        late = time.monotonic() > self._end
        self.left += late
        return True if late else None


def chosen_tests(changed: Sequence[str]) -> list[str]:
    """Returns the test files and folders that concern changed files, those of changed test files first.

    Args:
        changed: Paths relative to the root of the checkout.
    """
    own = [path for path in changed if Path(path).name.startswith("test_") and (ROOT / path).exists()]
    found: list[str] = []
    for path in changed:
        package, *folders = Path(path).parts
        if path in own:
            continue
        longest = max((beginning for beginning in _TESTS if path.startswith(beginning)), key=len)
        inside = package in {"lit_mnist", "tests"} and len(folders) > 1
        folder = f"tests/{folders[0]}" if inside else f"tests/{package}"
        found += [folder] if longest in _GENERAL and (ROOT / folder).is_dir() else _TESTS[longest]
    return list(dict.fromkeys([*own, *found])) or list(_TESTS[""])


def changed_files() -> list[str]:
    """Returns the files that differ from the commit at which this branch left main, and new ones."""
    for base in ("origin/main", "main"):
        found = _git("merge-base", "HEAD", base)
        if found:
            break
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*_git("diff", "--name-only", *found), *new})


def main() -> int:
    """Runs the checks, and returns the exit code of the first that fails."""
    for words in (["-m", "ruff", "check", "--quiet", "."], ["train.py", "--devices", "2", "--max-steps", "40"]):
        with tempfile.TemporaryDirectory() as folder:
            run = [] if "ruff" in words else ["--run-dir", f"{folder}/run"]
            if code := subprocess.run([sys.executable, *words, *run], cwd=ROOT, check=False).returncode:
                return code
    chosen, limit = chosen_tests(changed_files()), TimeLimit(SECONDS)
    print("tests     " + " ".join(chosen), flush=True)
    code = pytest.main(["-q", "-x", "-m", "not slow", "-p", "no:xdist", *chosen], plugins=[limit])
    if limit.left:
        print(f"{limit.left} tests were left out after {SECONDS:.0f} s: make test runs them")
    # A folder may have slow tests only.
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
