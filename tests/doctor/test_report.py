"""The report as JSON, as text and as a page, and the documentation of the checks."""

from __future__ import annotations

import json
from pathlib import Path

from suite import PAGE, checks_table

import lit_mnist.doctor
from lit_mnist.doctor.findings import Finding, Report, Stage, Verdict
from lit_mnist.doctor.page import write_page
from lit_mnist.doctor.terminal import report_text

SCHEMA = json.loads((Path(lit_mnist.doctor.__file__).parent / "report.schema.json").read_text())
FINDINGS = (
    Finding(
        "LD013", Verdict.FAULT, "unequal <b>counts</b>", 0, "head.weight", "2.4e-01", "train.py:3 in step", "falls"
    ),
    Finding("LD012", Verdict.DEPENDS, "batch norm"),
    *(Finding(code, Verdict.NOT_REACHED, "There is no validation.") for code in ("LD022", "LD023")),
)
REPORT = Report(
    "train.py:Module", 2, FINDINGS, (Stage("one process", "6 steps", 1.5),), ("LD012", "LD013"), seconds=9.0
)


def test_the_report_has_the_form_of_the_schema() -> None:
    found = json.loads(json.dumps(REPORT.to_json()))
    properties = SCHEMA["properties"]
    assert found.keys() == properties.keys() == set(SCHEMA["required"])
    for name in ("findings", "stages"):
        items = properties[name]["items"]
        assert all(item.keys() == items["properties"].keys() == set(items["required"]) for item in found[name])
    verdicts = properties["findings"]["items"]["properties"]["verdict"]["enum"]
    assert verdicts == [verdict.value for verdict in Verdict]
    assert found["exit_code"] == 1


def test_the_exit_code_tells_what_happened() -> None:
    assert Report("a:b", 2).exit_code == 0
    assert Report("a:b", 2, error="Traceback").exit_code == 2
    assert Report("a:b", 2, FINDINGS, hang="Rank 0").exit_code == 3


def test_the_text_begins_with_the_fault() -> None:
    text = report_text(REPORT)
    assert "train.py:Module on 2 ranks: 1 fault" in text
    assert text.index("LD013") < text.index("LD012")
    assert all(part in text for part in ("step 0; head.weight; 2.4e-01", "train.py:3 in step", "falls"))
    assert "LD022, LD023: There is no validation." in text


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    write_page(tmp_path / "report.html", REPORT)
    page = (tmp_path / "report.html").read_text()
    assert "unequal &lt;b&gt;counts" in page
    assert not any(part in page for part in ("<script", '<link rel="stylesheet', "src="))


def test_the_documented_checks_are_those_of_the_package() -> None:
    assert checks_table() in PAGE.read_text()
