"""The guide shows what the doctor finds in its example, and the scripts find their marks in the pages."""

from __future__ import annotations

import sys
from pathlib import Path

import mutations
import pytest
import suite
from doctor_support import ROOT

from ddp_doctor.faults import describe

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.mark.slow
def test_the_guide_shows_the_findings_of_its_example(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddp_doctor import examine

    monkeypatch.chdir(ROOT / "examples")
    report = examine(command=(TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py"), timeout=200)
    assert [(finding.code, finding.verdict.value) for finding in report.findings] == [
        ("LD001", "fault"),
        ("LD014", "fault"),
        ("LD012", "depends on the number of devices"),
    ]
    page = suite.GUIDE.read_text()
    for finding in report.findings:
        assert f"{finding.code} {describe()[finding.code].title} ({finding.verdict.value})" in page
        assert f"at {finding.place}\n" in page


@pytest.mark.parametrize("mark", [suite.BEGIN, suite.END, mutations.BEGIN, mutations.END])
def test_the_page_of_the_measurements_has_each_mark_once(mark: str) -> None:
    assert suite.PAGE.read_text().count(mark) == 1
