"""The formats of the report for other programs: SARIF, GitHub's annotations and JUnit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from example_report import example, hostile

from ddp_doctor.faults import describe
from ddp_doctor.findings import Finding, Report, Verdict
from ddp_doctor.output.formats import formatted
from ddp_doctor.output.sarif import sarif_of

# What SARIF 2.1.0 wants of the objects that the doctor writes. The complete schema is 110 kB.
REQUIRED = {
    "runs": {"tool", "results"},
    "rules": {"id", "shortDescription", "help"},
    "results": {"message", "ruleId", "level"},
    "invocations": {"executionSuccessful"},
    "locations": {"physicalLocation"},
    "suppressions": {"kind"},
}
LEVELS = {"error", "warning", "note", "none"}


def lacking(value: Any, kind: str = "") -> list[str]:
    """Returns what a SARIF log lacks."""
    if isinstance(value, list):
        return [text for item in value for text in lacking(item, kind)]
    if not isinstance(value, dict):
        return []
    found = [f"{kind} lacks {name}" for name in REQUIRED.get(kind, set()) - value.keys()]
    if "level" in value and value["level"] not in LEVELS:
        found.append(f"{value['level']} is no level")
    return found + [text for name, item in value.items() if name != "properties" for text in lacking(item, name)]


@pytest.mark.parametrize("report", [example(), hostile(), Report("a", 2), example(hang="stacks")])
def test_sarif_has_the_objects_of_its_standard(report: Report) -> None:
    log = json.loads(formatted(report, "sarif"))
    assert (log["version"], lacking(log)) == ("2.1.0", [])
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(describe())
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    assert run["invocations"][0]["executionSuccessful"] is not bool(report.hang or report.error)


def test_a_result_is_in_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    report = example(Finding("LD009", Verdict.FAULT, "Not averaged.", place="my model.py:41 in step"))
    (result, suppressed) = sarif_of(report)["runs"][0]["results"]
    where = result["locations"][0]["physicalLocation"]
    assert where["artifactLocation"] == {"uri": "my%20model.py", "uriBaseId": "%SRCROOT%"}
    assert (where["region"], result["level"]) == ({"startLine": 41}, "error")
    assert suppressed["suppressions"] == [{"kind": "inSource", "justification": "meant"}]
    # A workflow runs in a folder of the repository.
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert "::error file=src/my model.py,line=41,title=LD009 " in formatted(report, "github")


def test_an_annotation_is_one_line_and_one_command() -> None:
    lines = formatted(example(), "github").splitlines()
    commands = [line for line in lines if line.startswith("::")]
    assert [line.split(" ")[0] for line in commands] == ["::error", "::warning", "::warning", "::notice"]
    assert "file=mine.py,line=41,title=LD012 Batch norm" in commands[0]
    assert "%0Astep 0; net.bn1" in commands[0]
    assert "title=LD032 Ranks write one file%2C or do not end::" in commands[3]
    shown = formatted(hostile(), "github").splitlines()
    assert [line.split(" ")[0] for line in shown[2:]] == ["::error"] * 3


def test_the_checks_are_cases_of_junit() -> None:
    suite = ET.fromstring(formatted(example(hang="stacks \x1b"), "junit").encode())  # noqa: S314
    counted = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": "9", "failures": "1", "errors": "1", "skipped": "4"}
    failed = [case for case in suite if case.find("failure") is not None]
    assert [(case.get("file"), case.get("line")) for case in failed] == [("mine.py", "41")]
    skipped = [case.find("skipped") for case in suite]
    assert "not reached: The program does not predict." in [one.get("message") for one in skipped if one is not None]
    assert ET.fromstring(formatted(hostile(), "junit").encode()) is not None  # noqa: S314
