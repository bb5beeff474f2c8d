"""Every command of the documentation runs and prints what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT
from console import Command, commands_of, find_difference, matches, prepare, run

DOCS = ROOT / "docs"
PAGES = sorted(path for path in [*DOCS.rglob("*.md"), ROOT / "README.md"] if commands_of(path))


# make soak runs the commands of the other pages, which train for longer.
_LONG = {
    *(f"docs/{name}.md" for name in ("export", "loggers", "questions")),
    *(
        f"docs/tutorial/{name}.md"
        for name in ("03-torchrun", "06-batch-norm", "07-precision", "09-checkpoints", "10-lightning")
    ),
    *(f"docs/tutorial/{name}.md" for name in ("11-frameworks", "12-collectives", "13-failures", "14-machines")),
    "docs/tutorial/15-yours.md",
}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if _name(page) in _LONG else ()) for page in PAGES],
    ids=_name,
)
def test_the_commands_print_what_the_page_shows(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = prepare(tmp_path)
    if not any("ddp-doctor" in command.text for command in commands_of(page)):
        # In a fork, the doctor would name a place in the test as the user's.
        request.getfixturevalue("forked_python")
    for command in commands_of(page):
        done = run(command, folder)
        where = f"{page.relative_to(ROOT)}:{command.line}: $ {command.text}"
        assert done.code == 0, f"{where}\nexit code {done.code}\n{done.out}"
        missing = find_difference(command.expected, done.out)
        assert missing is None, f"{where}\nshown on the page: {missing}\nprinted:\n{done.out}"


def test_every_chapter_shows_commands() -> None:
    chapters = sorted((DOCS / "tutorial").glob("[0-9]*.md"))
    assert len(chapters) == 15
    assert not [path.name for path in chapters if len(commands_of(path)) < 2]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("tested  98.52% (9852 of 10000), loss 0.046", "tested    98.49% (9849 of 10000), loss 0.047", True),
        ("tested  98.52% (9852 of 10000), loss 0.046", "tested  91.00% (9100 of 10000), loss 0.046", False),
        ("counted 10167 samples", "counted 10000 samples", False),
        ("859 steps in 24.3 s", "859 steps in 7 s", True),
        ("859 steps in 24.3 s", "858 steps in 24.3 s", False),
        ("weights ... equal", "weights c090d456 are equal", True),
        ("weights ... equal", "weights c090d456 differ", False),
    ],
)
def test_lines_are_compared_apart_from_rounding_and_times(shown: str, printed: str, same: bool) -> None:
    assert matches(shown, printed) is same


@pytest.mark.parametrize(
    ("shown", "missing"),
    [(("a", "b"), None), (("a",), "(nothing more) but found: b"), (("...", "b"), None), (("b",), "b"), ((), None)],
)
def test_a_line_that_was_not_printed_is_found(shown: tuple[str, ...], missing: str | None) -> None:
    assert find_difference(shown, "a\nb\n") == missing


def test_commands_are_read_with_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```console\n$ python a.py \\\n    --flag\nprinted\n$ ls\n```\n")
    first, second = commands_of(page)
    assert first == Command("page.md", 4, "python a.py --flag", ("printed",))
    assert (second.line, second.text, second.expected) == (7, "ls", ())
