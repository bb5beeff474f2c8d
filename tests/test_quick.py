"""`make quick` runs the tests that concern the changed files, for a limited time."""

from pathlib import Path

import pytest
from quick import TimeLimit, chosen_tests


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["lit_mnist/checkpoint/store.py"], ["tests/checkpoint"]),
        (["lit_mnist/module.py"], ["tests/test_template.py", "tests/test_trainers.py"]),
        (["ddp_doctor/checks/same_order_every_epoch.py"], ["tests/ddp_doctor/test_checks.py"]),
        (["ddp_doctor/watch/rank.py"], ["tests/ddp_doctor/test_watch.py"]),
        (["docs/plugins.md"], ["tests/docs/test_site.py", "tests/docs/test_words.py"]),
        (["docs/promises.md"], ["tests/mutations"]),
        (["mkdocs.yml"], ["tests/docs/test_site.py"]),
        (["tests/plugins/modules.py"], ["tests/plugins"]),
        (["tests/mutations/mutations.yaml"], ["tests/mutations"]),
        (["benchmarks/rounds.py"], ["tests/benchmarks"]),
        (["tests/conftest.py"], ["tests/repository"]),
        (["lit_mnist/errors.py", "tests/test_needs.py"], ["tests/test_needs.py", "tests/test_template.py"]),
        (["tests/gone/test_gone.py"], ["tests/repository"]),
        ([], ["tests/repository"]),
    ],
)
def test_the_chosen_tests_a_changed_file_are_those_of_its_folder(changed: list[str], expected: list[str]) -> None:
    assert chosen_tests(changed)[: len(expected)] == expected


def test_every_test_that_is_chosen_exists() -> None:
    root = Path(__file__).parents[1]
    for path in [*root.glob("*/*.py"), *root.glob("*/*/*.py"), *root.glob("*.*"), *root.glob("docs/*.md")]:
        chosen = chosen_tests([str(path.relative_to(root))])
        assert all((root / found.partition("::")[0]).exists() for found in chosen), path


def test_tests_that_would_begin_too_late_are_left_out(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_first():\n    assert True\n\ndef test_second():\n    assert False\n")
    for seconds, failed, left in ((60.0, 1, 0), (-1.0, 0, 2)):
        limit = TimeLimit(seconds)
        result = pytester.inline_run("-p", "no:cacheprovider", plugins=[limit])
        assert (result.countoutcomes()[2], limit.left) == (failed, left)
