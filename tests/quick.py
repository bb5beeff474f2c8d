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
# Tests of files that are in no folder of the same name.
_OTHERS = {
    "lit_mnist/": ("tests/test_template.py", "tests/test_trainers.py"),
    "ddp_doctor/": ("tests/ddp_doctor/test_checks.py", "tests/ddp_doctor/test_properties.py"),
    "docs/": ("tests/docs/test_site.py", "tests/repository"),
    "configs/": ("tests/cli/test_configs.py",),
    "examples/": ("tests/examples",),
    "": ("tests/repository",),
}


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
        if path in own or package == "tests":
            continue
        folder = f"tests/{folders[0]}" if package == "lit_mnist" and len(folders) > 1 else f"tests/{package}"
        is_known = package != "ddp_doctor" and (ROOT / folder).is_dir()
        prefix = next(prefix for prefix in _OTHERS if path.startswith(prefix))
        found += [folder] if is_known else _OTHERS[prefix]
    return list(dict.fromkeys([*own, *found])) or list(_OTHERS[""])


def changed_files() -> list[str]:
    """Returns the files that differ from main, or from the commit before on main, and new ones."""
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
