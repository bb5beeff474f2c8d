"""The report as JSON, as text and as a page, and the documentation of the checks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import suite
from doctor_support import Page
from example_report import example, hostile
from suite import BEGIN, END, GUIDE, PAGE, checks_table, rows_of_page

import ddp_doctor
from ddp_doctor.findings import REASONS, CheckState, Comparison, Finding, Report, Stage, State, Verdict
from ddp_doctor.output.page import curve_of, page_of
from ddp_doctor.output.terminal import report_text

SCHEMA = json.loads((Path(ddp_doctor.__file__).parent / "report.schema.json").read_text())
FINDINGS = (
    Finding(
        "LD013", Verdict.FAULT, "unequal <b>counts</b>", 0, "head.weight", "2.4e-01", "train.py:3 in step", "falls"
    ),
    Finding("LD012", Verdict.DEPENDS, "batch norm"),
)
CHECKS = (
    CheckState("LD012", State.MADE),
    CheckState("LD013", State.MADE),
    CheckState("LD014", State.CANNOT_TELL, "The loss is not finite."),
    *(CheckState(code, State.NOT_REACHED, "There is no validation.") for code in ("LD022", "LD023")),
)
STAGES = (Stage("one process", "6 steps", 1.5),)
REPORT = Report("train.py:Module", 2, FINDINGS, STAGES, CHECKS, Comparison(True, "recorded batches"), seconds=9.0)


TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def violations(value: Any, schema: dict[str, Any], at: str = "report") -> list[str]:
    """Returns what violates a schema, for the keywords that the doctor's schema uses."""
    unknown = set(schema) - {"$schema", "$defs", "title", "description", "type", "required", "additionalProperties"}
    assert unknown <= {"properties", "const", "enum", "minimum", "items", "$ref", "pattern"}
    if "$ref" in schema:
        return violations(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], at)
    names = schema.get("type", [])
    kinds = tuple(TYPES[name] for name in ([names] if isinstance(names, str) else names))
    if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        return [f"{at} is {value!r}"]
    wrong = (
        ("const" in schema and value != schema["const"])
        or ("enum" in schema and value not in schema["enum"])
        or ("pattern" in schema and not re.search(schema["pattern"], value))
        or ("minimum" in schema and value is not None and value < schema["minimum"])
    )
    found = [f"{at} is {value!r}"] if wrong else []
    if isinstance(value, list):
        found += [told for n, item in enumerate(value) for told in violations(item, schema["items"], f"{at}[{n}]")]
    if isinstance(value, dict):
        found += [f"{at} lacks {name}" for name in schema.get("required", []) if name not in value]
        more = schema["additionalProperties"]
        for name, item in value.items():
            part = schema.get("properties", {}).get(name, more)
            found += [f"{at}.{name} is unknown"] if part is False else violations(item, part, f"{at}.{name}")
    return found


@pytest.mark.parametrize("report", [example(), hostile(), Report("a", 2), example(hang="stacks")])
def test_every_report_has_the_published_form(report: Report) -> None:
    assert violations(json.loads(json.dumps(report.to_json(), allow_nan=False)), SCHEMA) == []


def test_the_schema_rejects_other_forms() -> None:
    written = json.loads(json.dumps(example().to_json()))
    written["findings"][0] |= {"verdict": "perhaps", "step": -1}
    del written["target"]
    assert len(violations(written | {"more": 1}, SCHEMA)) == 4


def test_the_report_has_the_form_of_the_schema() -> None:
    found = json.loads(json.dumps(REPORT.to_json()))
    properties = SCHEMA["properties"]
    assert found.keys() == properties.keys() == set(SCHEMA["required"])
    for name in ("findings", "stages", "checks"):
        items = properties[name]["items"]
        items = SCHEMA["$defs"]["finding"] if "$ref" in items else items
        assert all(item.keys() == items["properties"].keys() == set(items["required"]) for item in found[name])
    verdicts = SCHEMA["$defs"]["finding"]["properties"]["verdict"]["enum"]
    assert verdicts == [verdict.value for verdict in Verdict if verdict not in REASONS]
    assert properties["checks"]["items"]["properties"]["state"]["enum"] == [state.value for state in State]
    assert found["exit_code"] == 1


def test_the_exit_code_tells_what_happened() -> None:
    assert Report("a:b", 2).exit_code == 0
    assert Report("a:b", 2, error="Traceback").exit_code == 2
    assert Report("a:b", 2, FINDINGS, hang="Rank 0").exit_code == 3


def test_the_text_begins_with_the_fault() -> None:
    text = report_text(REPORT)
    assert text.splitlines()[1:3] == ["1 fault found.", "train.py:Module on 2 ranks, compared with one process"]
    assert text.index("LD013") < text.index("LD012")
    assert all(part in text for part in ("step 0; head.weight; 2.4e-01", "train.py:3 in step", "falls"))


def test_the_text_counts_the_checks_and_lists_the_open_ones() -> None:
    text = report_text(REPORT)
    assert "checks: 2 made, 2 not reached (the program does not do this), 1 cannot tell" in text
    assert "- cannot tell: LD014: The loss is not finite." in text
    assert "LD022" not in text
    told = report_text(REPORT, verbose=True)
    assert "- not reached: LD022, LD023: There is no validation." in told
    assert "- made: LD012, LD013" in told


def test_the_error_precedes_a_reason_that_all_checks_share() -> None:
    checks = tuple(CheckState(check.code, State.CANNOT_TELL, "the run failed") for check in CHECKS)
    shown = report_text(Report("a:b", 2, checks=checks, error="ValueError: no data"))
    reason = f"- cannot tell: all {len(checks)} checks: the run failed"
    assert 0 < shown.index("ValueError: no data") < shown.index(reason)
    assert "LD012" not in shown


def test_the_first_line_says_that_nothing_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "118")
    compared = Comparison(reason="it hung", option="A longer --timeout than 60 seconds may make it possible.")
    text = " ".join(report_text(replace(REPORT, findings=(), comparison=compared)).split())
    assert text.startswith(
        "No fault found; the comparison with one process was not made, because it hung. A longer --timeout than 60"
    )
    assert report_text(replace(REPORT, findings=())).splitlines()[1] == "No fault found."
    told = report_text(replace(REPORT, findings=(), comparison=None)).splitlines()[1]
    assert told.endswith("was not made, because none of the chosen checks needs it.")


def test_the_report_says_how_the_files_were_kept_and_where_the_output_is() -> None:
    page = Page(page_of(example())).content
    for text in (" ".join(report_text(example()).split()), page):
        assert "a private view of all files" in text
        assert "Files in /data can be read, but not written." in text
        assert "/home/me/doctor-output" in text
        assert "connected to a:443" in text
    assert "Your files" not in report_text(REPORT)


@pytest.mark.parametrize("width", [60, 80, 118])
def test_the_text_keeps_the_width_of_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = Finding("LD012", Verdict.FAULT, "word " * 60, 0, "net." * 40, "x" * 150, "/" + "folder/" * 30, "y" * 150)
    text = report_text(example(long, Finding("LD013", Verdict.NOTE, "z" * 150)))
    assert max(map(len, text.splitlines())) <= width
    assert text.count("z") >= 150


def test_the_text_has_the_fix_in_one_line() -> None:
    assert "fix: Convert batch norm" in report_text(example())


def test_the_examined_code_does_not_control_the_terminal() -> None:
    text = report_text(hostile())
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\ud800-\udfff]", text)
    assert "\\x1b[2J" in text
    # A line of the examined code cannot pose as a line of the report.
    assert not any(line.startswith("LD001") for line in text.splitlines())


def test_the_page_lists_faults_first_and_escapes_the_examined_code() -> None:
    page = Page(page_of(example()))
    assert page.balanced
    assert page.find("title")[0]["text"] == "1 fault found"
    assert [e["text"] for e in page.find("h2")] == [
        "Faults",
        "Depends on the number of devices",
        "Unclear",
        "Notes",
        "Compared with one process",
        "Accepted",
        "The checks",
        "The examination",
    ]
    assert "convert_sync_batchnorm" in page.content
    page = Page(page_of(hostile()))
    assert page.balanced
    assert not page.find("script")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page.content)


def test_the_page_draws_the_differences_from_one_process() -> None:
    drawing = curve_of(Comparison(True, differences=(0.0, 1e-16, 2e-2, float("nan")), threshold=1e-6))
    assert drawing
    assert [point["above"] for point in drawing["points"]] == [False, False, True, True]
    heights = [point["y"] for point in drawing["points"]]
    assert heights[0] >= heights[1] > drawing["threshold"] > heights[2] > heights[3]
    assert "step 2: 2.0e-02, step 3: not finite" in drawing["title"]
    assert len(Page(page_of(example())).find("svg")) == 1
    page = Page(page_of(replace(example(), batches=[], comparison=None)))
    assert page.balanced
    assert not page.find("svg")


def test_the_page_is_self_contained_and_escaped() -> None:
    page = page_of(REPORT)
    assert "unequal &lt;b&gt;counts" in page
    assert not any(part in page for part in ("<script", '<link rel="stylesheet', "src="))


def test_the_results_of_the_suite_are_read_from_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a new checkout, an examination of one program keeps the results of the others."""
    rows, before = rows_of_page(), PAGE.read_text()
    assert len(rows) > 100
    copy = tmp_path / PAGE.name
    copy.write_text(before)
    monkeypatch.setattr(suite, "PAGE", copy)
    suite._write(rows)
    listed = [text.partition(BEGIN)[2].partition(END)[0].splitlines() for text in (copy.read_text(), before)]
    assert [line for line in listed[0] if line in listed[1] or "not examined" in line] == listed[0]
    assert len(rows_of_page()) == len(rows)


def test_the_documented_checks_are_those_of_the_package() -> None:
    assert checks_table() in GUIDE.read_text()
