"""The Chinese README has the structure, the commands, the links and the numbers of the English one.

The numbers of the doctor's suite are those of the page with its results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest

import pytest
from conftest import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
# At the top, each README links to the other one.
LANGUAGES = {ENGLISH.name, CHINESE.name}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TRANSLATED = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]")


@dataclass(frozen=True)
class Section:
    """The part of a README below a heading, without the words that a translation changes."""

    level: int
    code: list[tuple[str, list[str]]]
    links: list[str]
    inline: list[str]
    rows: list[tuple[int, list[str]]]
    items: int
    numbers: list[str]


def sections_of(text: str) -> list[Section]:
    found = []
    # A line of code begins with `# ` only in a comment of its own, of which these blocks have none.
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE)[1:]:
        prose = FENCED.sub("", part)
        lines = prose.splitlines()
        targets = re.findall(r"\]\(([^)]+)\)", prose)
        rows = [line for line in lines if line.startswith("|")]
        prose = re.sub(r"\]\([^)]+\)", "]", prose)
        found.append(
            Section(
                level=len(part) - len(part.lstrip("#")),
                code=[(language, block.splitlines()) for language, block in FENCED.findall(part)],
                links=sorted(target for target in targets if target not in LANGUAGES),
                inline=sorted(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)),
                rows=[(row.count("|"), numbers_in(row)) for row in rows],
                items=sum(line.startswith("- ") for line in lines),
                numbers=numbers_in(prose),
            )
        )
    return found


def numbers_in(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:[.,]\d+)*(?:e-?\d+)?", re.sub(r"`[^`]*`", "", text)))


def is_translation(english: str, chinese: str) -> bool:
    """Returns whether a line of code is the same up to the first translated word."""
    first = TRANSLATED.search(chinese)
    return english.startswith(chinese[: first.start()]) if first else english == chinese


def test_the_readmes_have_the_same_structure_and_numbers() -> None:
    english, chinese = (sections_of(path.read_text(encoding="utf-8")) for path in (ENGLISH, CHINESE))
    assert len(english) > 5
    for ours, theirs in zip_longest(english, chinese):
        for name in ("level", "links", "inline", "rows", "items", "numbers"):
            assert getattr(theirs, name, None) == getattr(ours, name, None), name


def test_the_readmes_show_the_same_code() -> None:
    english, chinese = (FENCED.findall(path.read_text(encoding="utf-8")) for path in (ENGLISH, CHINESE))
    assert [language for language, _ in chinese] == [language for language, _ in english]
    for (_, ours), (_, theirs) in zip(english, chinese, strict=True):
        for line, translated in zip_longest(ours.splitlines(), theirs.splitlines(), fillvalue=""):
            assert is_translation(line, translated), f"{translated!r} is not a translation of {line!r}"


def test_each_readme_links_to_the_other_one_at_its_top() -> None:
    for path, other in ((ENGLISH, CHINESE), (CHINESE, ENGLISH)):
        head = "".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:3])
        assert f"]({other.name})" in head


def test_the_results_of_the_suite_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "doctor-proof.md").read_text(encoding="utf-8")
    promises = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^- (all with a finding|all without): (\d+ of \d+) as expected", page, re.MULTILINE))
    for path in (ENGLISH, CHINESE):
        shown = re.findall(r"\*\*(\d+)[^*\d]+(\d+)[^*\d]*\*\*", path.read_text(encoding="utf-8"))
        assert [f"{some} of {all_}" for some, all_ in shown][:2] == list(found.values()), path.name
    assert f"seen for {found['all with a finding']} programs with a finding" in promises
    assert f"and {found['all without']} without" in promises


@pytest.mark.parametrize(
    ("english", "chinese", "same"),
    [
        ("make test     # runs the tests", "make test     # 运行测试", True),
        ("make test     # runs the tests", "make tests    # 运行测试", False),
        ("trainer.fit(classifier)", "trainer.fit(classifier)", True),
        ("trainer.fit(classifier)", "trainer.test(classifier)", False),
        ("  run/        run folder", "  run/        运行目录", True),
        ("  run/        run folder", "  runs/       运行目录", False),
    ],
)
def test_a_line_may_differ_in_its_words_only(english: str, chinese: str, same: bool) -> None:
    assert is_translation(english, chinese) is same


@pytest.mark.parametrize(
    "change",
    [
        ("99.03 %", "99.04 %"),
        ("(docs/speed.md)", "(docs/fast.md)"),
        ("`make soak`", "`make long`"),
        ("### ", "#### "),
        ("- one\n", ""),
        ("| a | b |", "| a |"),
    ],
    ids=["number", "link", "command", "heading", "item", "row"],
)
def test_what_is_out_of_step_is_found(change: tuple[str, str]) -> None:
    text = "# t\n\nRun `make soak`: 99.03 %, see [speed](docs/speed.md).\n\n### more\n\n- one\n- two\n\n| a | b |\n"
    assert sections_of(text.replace(*change)) != sections_of(text)
