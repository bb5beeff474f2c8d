"""Each promise has a mutation that can be applied, and tests that `make test` runs; the runner finds what survives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import mutate
import pytest
from conftest import COLLECTED, ROOT, run_forked
from mutate import Mutation, read_mutations, read_promises

HOW = (
    "Add an entry to tests/mutations/mutations.yaml: the first words of the promise, a file, its text, the text that "
    "breaks the promise, and the tests that must fail. Then run: python tests/mutations/mutate.py --only WORDS"
)


COLLECT = """
import pytest

class Plugin:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print("item", int(item.get_closest_marker("slow") is None), item.nodeid)

pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider"], plugins=[Plugin()])
"""


def collected(config: pytest.Config) -> dict[str, bool]:
    """Returns the node IDs that pytest collects, and whether `make test` runs them."""
    if [(config.rootpath / name).resolve() for name in config.args] == [ROOT / "tests"]:
        return config.stash[COLLECTED]
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("item ")]
    assert len(lines) > 2000, done.stdout + done.stderr
    return {node: quick == "1" for _, quick, node in lines}


def test_each_promise_has_a_mutation() -> None:
    promises, mutations = read_promises(), read_mutations()
    assert len(promises) > 70
    for mutation in mutations:
        rows = [promise for promise in promises if promise.startswith(mutation.promise)]
        assert len(rows) == 1, f"{len(rows)} rows of docs/promises.md begin with {mutation.promise!r}, but one must."
    without = [promise for promise in promises if not any(promise.startswith(each.promise) for each in mutations)]
    assert not without, "\n".join(["These promises have no mutation:", *without, HOW])


def test_each_mutation_can_be_applied() -> None:
    failures = []
    for mutation in read_mutations():
        try:
            text = mutation.applied_to(ROOT)
            if mutation.file.endswith(".py"):
                compile(text, mutation.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            failures.append(f"{mutation.promise}: {error}")
    assert not failures, "\n".join([*failures, "Where the code has changed, change `old` and `new` with it."])


def test_the_tests_of_each_mutation_exist_and_each_promise_has_a_test_in_make_test(
    pytestconfig: pytest.Config,
) -> None:
    found = collected(pytestconfig)
    functions = {test.partition("[")[0] for test in found}
    named = {test for mutation in read_mutations() for test in mutation.tests}
    missing = sorted(test for test in named if test not in (found if "[" in test else functions))
    assert not missing, "\n".join(["These tests of tests/mutations/mutations.yaml do not exist:", *missing])
    files = {test.partition("::")[0] for test, quick in found.items() if quick}
    for line in (ROOT / "docs" / "promises.md").read_text().splitlines():
        for path in re.findall(r"`(tests/\S+\.py)`", line):
            assert path in files, f"`make test` runs nothing of {path}, which docs/promises.md names:\n{line}"


SOURCE = "def double(number):\n    return 2 * number\n\n\ndef forgotten(number):\n    return 3 * number\n"
TESTS = """
import subprocess
import time

import pytest
from program import double, forgotten

@pytest.mark.parametrize("number", [0, 1])
def test_double(number):
    assert double(number) == 2 * number

def test_forgotten():
    forgotten(1)

@pytest.mark.skip(reason="not here")
def test_elsewhere():
    pass

def test_hangs():
    subprocess.Popen(["sleep", "4321"], start_new_session=True)
    if forgotten(1) != 3:
        time.sleep(100)
"""
# What is written in the place of `2 * number`, the tests, whether that is found, and the words for the table.
CASES: list[tuple[str, str, list[str], bool, str]] = [
    ("2 * number", "3 * number", ["test_double"], True, "found: assert 3 == (2 * 1)"),
    ("2 * number", "3 * number", ["test_double[1]", "test_double[0]"], False, "**survives** PLACE::test_double[0]"),
    ("3 * number", "4 * number", ["test_forgotten", "test_hangs"], False, "**survives** PLACE::test_forgotten"),
    ("2 * number", "3 * number", ["test_elsewhere"], True, "not run: not here"),
    ("5 * number", "3 * number", ["test_double"], False, "**cannot be applied**: program.py has the text '5 * n"),
    ("number", "numbers", ["test_double"], False, "**cannot be applied**: program.py has the text 'number' 4 times"),
    ("2 * number", "3 * number", ["test_missing"], False, "**fails without the mutation**"),
]


def test_a_mutation_is_found_or_survives_and_leaves_no_process(tmp_path: Path) -> None:
    root, place = tmp_path / "checkout", "tests/test_program.py"
    (root / "tests").mkdir(parents=True)
    (root / "program.py").write_text(SOURCE)
    (root / place).write_text(TESTS)
    mutations = [
        Mutation("a promise", "program.py", old, new, tuple(f"{place}::{test}" for test in tests))
        for old, new, tests, *_ in CASES
    ]

    def work() -> int:
        names = tuple(test for each in mutations[:-1] for test in each.tests)
        unchanged = {**mutate.run_tests(names, root, 3), **mutate.run_tests(mutations[-1].tests, root, 3)}
        for mutation, (*_, found, told) in zip(mutations, CASES, strict=True):
            result = mutate.judge(mutation, root, unchanged, 3)
            assert result[0] == found, result
            assert result[1].startswith(told.replace("PLACE", place)), result
            assert (root / "program.py").read_text() == SOURCE
        return 0

    done = run_forked(work, tmp_path)
    assert done.code == 0, done.out + done.err
