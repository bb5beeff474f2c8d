"""Findings that the user accepts, and the settings of `pyproject.toml`."""

from pathlib import Path

import pytest

from ddp_doctor.accepted import accept_baseline, accept_comments, baseline_text
from ddp_doctor.errors import InputError
from ddp_doctor.findings import Finding, Report, Verdict
from ddp_doctor.flags import parse

IGNORE = "  # ddp-doctor: ignore[LD012] large batches"


def report(place: str = "mine.py:2 in step", code: str = "LD012") -> Report:
    return Report("mine.py:main", 2, [Finding(code, Verdict.FAULT, "It differs.", place=place)])


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        (f"a()\nb(\n    1\n){IGNORE}", 2, "large batches"),
        (f"a()\nb(\n    1,{IGNORE}\n)", 2, "large batches"),
        ("a()  # ddp-doctor: ignore[LD009, ld012] both", 1, "both"),
        (f"#{IGNORE[3:]}\na()\nb()", 2, "large batches"),
        (f"def f():{IGNORE}\n    a()", 1, "large batches"),
        (f"def f():{IGNORE}\n    a()\n    b()", 3, ""),
        (f"a(){IGNORE}\nb()", 2, ""),
        ("a()  # ddp-doctor: ignore[LD012]", 1, ""),
        ("a()  # ddp-doctor: ignore[LD099] typing error", 1, ""),
        (f"a(:{IGNORE}", 1, ""),
    ],
)
def test_a_comment_with_a_reason_accepts_the_findings_of_its_statement(source: str, line: int, reason: str) -> None:
    Path("mine.py").write_text(source)
    found = accept_comments(report(f"mine.py:{line} in f"))
    assert [one.reason for one in found.accepted] == ([reason] if reason else [])
    assert found.exit_code == (not reason)


def test_a_baseline_accepts_what_it_holds_and_nothing_new() -> None:
    Path("base.json").write_text(baseline_text(report()))
    moved = accept_baseline(report("mine.py:20 in step"), "base.json")
    assert (moved.exit_code, [one.by for one in moved.accepted]) == (0, ["baseline"])
    assert accept_baseline(report("mine.py:2 in other"), "base.json").exit_code == 1
    assert accept_baseline(report(code="LD009"), "base.json").exit_code == 1


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}'])
def test_another_file_is_no_baseline(text: str) -> None:
    Path("base.json").write_text(text)
    with pytest.raises(InputError, match="--baseline"):
        accept_baseline(report(), "base.json")


def test_settings_come_before_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[tool.ddp-doctor]\ndevices = 4\nskip = ["LD012", "LD013"]\nverbose = true\nbaseline = "base.json"\n'
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    request = parse(["a:b"])
    assert (request.devices, request.skip, request.verbose) == (4, ["LD012", "LD013"], True)
    assert request.baseline == str(tmp_path / "base.json")
    assert parse(["a:b", "--devices", "3"]).devices == 3


@pytest.mark.parametrize(
    "section", ["device = 2", "devices = 'two'", "format = 'xml'", "verbose = 'yes'", "devices = "]
)
def test_wrong_settings_are_rejected_with_their_file(section: str) -> None:
    Path("pyproject.toml").write_text(f"[tool.ddp-doctor]\n{section}\n")
    with pytest.raises(InputError, match=r"pyproject\.toml"):
        parse(["a:b"])
