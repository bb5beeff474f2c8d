"""The report in each of its forms: text, JSON, SARIF, GitHub's annotations and comments, JUnit and the page."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from example_report import FAULT, example, hostile

import ddp_doctor
from ddp_doctor.faults import load_checks, short_fix
from ddp_doctor.findings import REASONS, Finding, Report, Verdict
from ddp_doctor.output.formats import FORMATS, formatted, read_report
from ddp_doctor.output.page import page_of
from ddp_doctor.output.terminal import STATES, print_text

SCHEMA = json.loads((Path(ddp_doctor.__file__).parent / "report.schema.json").read_text())
REPORTS = (example(), hostile(), Report("a", 2), example(hang="stacks"))


@pytest.mark.parametrize("report", REPORTS)
def test_the_json_has_the_form_of_the_schema_and_every_field_of_it(report: Report) -> None:
    told = json.loads(json.dumps(report.to_json(), allow_nan=False))
    jsonschema.validate(told, SCHEMA)
    for wrong in (told | {"more": 1}, told | {"exit_code": 9}, {key: told[key] for key in told if key != "target"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)
    assert told.keys() == SCHEMA["properties"].keys()
    verdicts = SCHEMA["$defs"]["finding"]["properties"]["verdict"]["enum"]
    assert verdicts == [verdict.value for verdict in Verdict if verdict not in REASONS]
    assert SCHEMA["properties"]["checks"]["items"]["properties"]["state"]["enum"] == [*reversed(STATES)]


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (Report("a:b", 2), 0),
        (Report("a:b", 2, [FAULT]), 1),
        (Report("a:b", 2, [replace(FAULT, verdict=Verdict.UNCLEAR)]), 0),
        (Report("a:b", 2, error="Traceback"), 2),
        (Report("a:b", 2, [FAULT], hang="Rank 0"), 3),
    ],
)
def test_the_exit_code_tells_what_happened(report: Report, code: int) -> None:
    assert report.exit_code == report.to_json()["exit_code"] == code


@pytest.mark.parametrize("form", [*FORMATS, "page", "printed"])
def test_the_examined_code_controls_neither_the_terminal_nor_the_page(form: str) -> None:
    stream = io.StringIO()
    print_text(str(hostile()), stream)
    text = {"page": page_of, "printed": lambda _: stream.getvalue()}.get(form, lambda one: formatted(one, form))(
        hostile()
    )
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\ud800-\udfff]", text)
    # A line of the examined code cannot pose as one of the report.
    assert not re.search("^(✗ LD001|::error title=LD001)", text, re.MULTILINE)


def test_the_page_is_self_contained_and_draws_the_differences() -> None:
    page = page_of(example())
    tree = ET.fromstring(page)  # noqa: S314
    assert [bar.get("style") for bar in tree.iterfind(".//span")] == ["width:6%", "width:85%", "width:100%"]
    assert not re.search("<script|src=|href=.http", page)
    assert not ET.fromstring(page_of(hostile())).findall(".//script")  # noqa: S314
    assert ET.fromstring(page_of(Report("a", 2))).find(".//span") is None  # noqa: S314


@pytest.mark.parametrize("report", REPORTS)
def test_sarif_has_the_objects_of_its_standard(report: Report) -> None:
    log = json.loads(formatted(report, "sarif"))
    (run,) = log["runs"]
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert (log["version"], list(rules)) == ("2.1.0", list(load_checks()))
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in rules.values())
    levels = {"LD012": "error", "LD008": "error", "LD017": "warning", "LD013": "warning", "LD032": "note"}
    for result in run["results"]:
        assert result["level"] == levels[result["ruleId"]]
        assert result["message"]["text"]
    assert run["invocations"][0]["executionSuccessful"] is not bool(report.hang or report.error)


def test_a_result_is_in_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    report = example(Finding("LD009", Verdict.FAULT, "Not averaged.", place="my model.py:41 in step"))
    (result, suppressed) = json.loads(formatted(report, "sarif"))["runs"][0]["results"]
    where = result["locations"][0]["physicalLocation"]
    assert where["artifactLocation"] == {"uri": "my%20model.py", "uriBaseId": "%SRCROOT%"}
    assert where["region"] == {"startLine": 41}
    assert suppressed["suppressions"] == [{"kind": "inSource", "justification": "meant"}]
    # A workflow runs in a folder of the repository.
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert "::error file=src/my model.py,line=41,title=LD009 " in formatted(report, "github")


def test_the_checks_are_cases_of_junit() -> None:
    suite = ET.fromstring(formatted(example(hang="stacks \x1b"), "junit"))  # noqa: S314
    counted = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": "9", "failures": "1", "errors": "1", "skipped": "4"}
    failed = [case for case in suite if case.find("failure") is not None]
    assert [(case.get("file"), case.get("line")) for case in failed] == [("mine.py", "41")]
    assert "not reached: The program does not predict." in [one.get("message") for one in suite.iter("skipped")]


GONE = [replace(FAULT, code=code, place="old.py:7 in main") for code in ("LD017", "LD014")]
MENTION = replace(FAULT, message="@you and #1: <b> *x* [a](b) `c*` ``d`", tensor="__init__", place="")
MANY = [replace(FAULT, code=code) for code in load_checks()]


@pytest.mark.parametrize(
    ("report", "before", "lines"),
    [
        (
            example(),
            None,
            [
                "### ddp-doctor: 1 fault found.",
                "- ✗ **LD012 Batch norm depends on the number of ranks** (fault)<br>The outputs of net.bn1 differ.<br>"
                "with synchronized batch norm the difference falls to 1.1e-15<br>step 0; net.bn1; 2.4e-02 of the update"
                r"<br>at mine.py:41 in training\_step<br>fix: ",
                short_fix(load_checks()["LD012"]),
                "- LD014, LD015: The loss is not finite.",
            ],
        ),
        (
            example(),
            example(FAULT, *GONE, Finding("LD008", Verdict.FAULT, "Equal.", place="mine.py:9 in f")),
            [
                "(fault, before: fault)",
                "(unclear, before: not found)",
                "**Before:** 4 faults found. mine:Lit on 2 ranks",
                # LD014 cannot tell.
                "- ✓ **LD017 The schedule depends on the number of ranks** (no longer found)<br>The",
                "- ? **LD014 The gradient has the wrong scale** (not examined now)",
                "- · **LD008 All ranks draw the same random numbers** (accepted now)",
            ],
        ),
        (Report("a.py", 0), None, ["### ddp-doctor: No fault found.", "a.py was read;", "only read, not run"]),
        (
            example(MENTION),
            None,
            [r"`@you` and `#1`: \<b\> \*x\* \[a\](b) `c*` \`\`d\`<br>with ", r"<br>step 0; \_\_init\_\_; 2.4e-02"],
        ),
        (example(*MANY, error="@you\n" * 99), example(*GONE * 9), ["\n\n    @you\n", f"- and {len(MANY) - 9} more"]),
    ],
)
def test_a_comment_has_the_evidence_and_what_became_of_the_findings_before(
    report: Report, before: Report | None, lines: list[str]
) -> None:
    if before:
        Path("before.json").write_text(formatted(before, "json"))
        before = read_report("before.json")
    text = formatted(report, "markdown", before=before)
    assert len(text.splitlines()) <= 30
    assert sorted(lines, key=text.find) == lines, text
    assert all(line in text for line in lines), text
