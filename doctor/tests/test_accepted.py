"""Findings that the user accepts, and the settings of `pyproject.toml`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_doctor.accepted import accept_baseline, accept_comments, baseline_text
from ddp_doctor.command import parse
from ddp_doctor.errors import InputError
from ddp_doctor.findings import CheckState, Finding, Report, State, Verdict

MADE = [CheckState(code, State.MADE) for code in ("LD009", "LD012")]
SOURCE = """\
def step(model):
    loss = model.loss(
        1,{inner}
    ){after}
    return loss
"""


def report(place: str = "mine.py:2 in step", code: str = "LD012") -> Report:
    return Report("mine.py:main", 2, [Finding(code, Verdict.FAULT, "It differs.", place=place)], checks=MADE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("inner", "after", "accepted", "notes"),
    [
        ("", "  # ddp-doctor: ignore[LD012] large batches", "large batches", []),
        ("  # ddp-doctor: ignore[LD009, LD012] both", "", "both", ["LD009 finds nothing"]),
        ("", "  # ddp-doctor: ignore[LD012]", "", ["gives no reason"]),
        ("", "  # ddp-doctor: ignore all of it", "", ["names no check"]),
        ("", "  # ddp-doctor: ignore[LD099] typing error", "", ["there is no check LD099"]),
        ("", "  # ddp-doctor: ignore[LD024] a check that was not made", "", []),
        ("", "", "", []),
    ],
)
def test_a_comment_accepts_findings_of_its_statement(
    folder: Path, inner: str, after: str, accepted: str, notes: list[str]
) -> None:
    (folder / "mine.py").write_text(SOURCE.format(inner=inner, after=after))
    found = accept_comments(report(), ["mine.py"])
    assert [one.reason for one in found.accepted] == ([accepted] if accepted else [])
    assert found.exit_code == (0 if accepted else 1)
    texts = [finding.message for finding in found.findings if finding.verdict is Verdict.NOTE]
    assert len(texts) == len(notes)
    assert all(part in text for part, text in zip(notes, texts, strict=True))


def test_a_comment_of_its_own_line_belongs_to_the_next_one(folder: Path) -> None:
    (folder / "mine.py").write_text("# ddp-doctor: ignore[LD012] above\nstep()\nother()\n")
    assert accept_comments(report("mine.py:2"), ["mine.py"]).exit_code == 0
    assert accept_comments(report("mine.py:3"), ["mine.py"]).exit_code == 1


def test_a_comment_at_the_head_of_a_block_does_not_cover_the_block(folder: Path) -> None:
    (folder / "mine.py").write_text("def step():  # ddp-doctor: ignore[LD012] head\n    a()\n    b()\n")
    assert accept_comments(report("mine.py:1"), ["mine.py"]).exit_code == 0
    assert accept_comments(report("mine.py:3"), ["mine.py"]).exit_code == 1


def test_a_baseline_accepts_what_it_holds_and_nothing_new(folder: Path) -> None:
    (folder / "base.json").write_text(baseline_text(report()))
    moved = accept_baseline(report("mine.py:20 in step"), "base.json")
    assert (moved.exit_code, [one.by for one in moved.accepted]) == (0, ["baseline"])
    assert accept_baseline(report("mine.py:2 in other"), "base.json").exit_code == 1
    assert accept_baseline(report(code="LD009"), "base.json").exit_code == 1
    # Written once more, it holds the same.
    assert baseline_text(moved) == (folder / "base.json").read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "findings": []}', '{"format": 1}'])
def test_another_file_is_no_baseline(folder: Path, text: str) -> None:
    (folder / "base.json").write_text(text)
    with pytest.raises(InputError, match="--baseline"):
        accept_baseline(report(), "base.json")


def test_settings_come_before_the_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[tool.ddp-doctor]\ndevices = 4\nskip = ["LD012", "LD013"]\nkeep-output = true\nbaseline = "base.json"\n'
    (folder / "pyproject.toml").write_text(text)
    (folder / "src").mkdir()
    monkeypatch.chdir(folder / "src")
    request = parse(["a:b"])
    assert (request.devices, request.skip, request.keep_output) == (4, ["LD012", "LD013"], True)
    assert request.baseline == str(folder / "base.json")
    assert parse(["a:b", "--devices", "3"]).devices == 3


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("device = 2", "did you mean devices"),
        ("explain = 'LD001'", "no key explain"),
        ("devices = 'two'", "invalid int value"),
        ("format = 'xml'", "invalid choice"),
        ("verbose = 'yes'", "ignored explicit argument"),
        ("devices = ", "cannot be read"),
    ],
)
def test_wrong_settings_are_rejected(folder: Path, section: str, said: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.ddp-doctor]\n{section}\n")
    with pytest.raises(InputError, match=said) as caught:
        parse(["a:b"])
    assert "pyproject.toml" in str(caught.value)
    assert json.dumps(str(caught.value)).count("\\n") == 0
