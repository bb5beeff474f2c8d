"""The text that users read has the words of the field, and sentences that a native speaker would write."""

from __future__ import annotations

from pathlib import Path

import pytest
from words import found, prose_of, strings_of

ROOT = Path(__file__).parents[2]
_PAGES = [
    page
    for folder in ("", "docs", "examples", ".github")
    for page in sorted((ROOT / folder).glob("**/*.md" if folder else "*.md"))
    # A dated note, and the history, say what was; the table of public programs is written by a script.
    if not {"notes", "node_modules"} & set(page.parts) and page.name not in {"CHANGELOG.md", "README.zh-CN.md"}
]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_plain_words(page: Path) -> None:
    assert list(found(prose_of(page.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize("package", ["lit_mnist", "ddp_doctor"])
def test_messages_and_docstrings_have_plain_words(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert [f"{path}: {said}" for path in files for text in strings_of(path) for said in found(text)] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("The run resumes a training.", 1),
        ("The run resumes a training run.", 0),
        ("It is exact, also on uneven ranks, and bit-identical, too.", 2),
        ("It is also exact on uneven ranks.", 0),
        ("A process that believes to be rank 0 belongs into the group.", 2),
        ("The same once more for the twin, anew.", 3),
    ],
)
def test_a_planted_phrase_is_found(text: str, count: int) -> None:
    assert len(list(found(text))) == count


def test_code_links_and_generated_comments_are_not_read() -> None:
    page = "Run it.\n\n```bash\n# a training, too\n```\n\n`a training, too` [page](a-training-anew.md) <!-- twin -->\n"
    assert list(found(prose_of(page))) == []


def test_messages_and_docstrings_are_read_and_comments_are_not(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(
        'def run():\n    """Resumes a training."""\n    # a twin\n    raise ValueError(f"The twin {run} ended.")\n'
    )
    assert len([said for text in strings_of(path) for said in found(text)]) == 2
