"""The report for other programs: JSON, SARIF, GitHub's annotations, JUnit. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Any
from xml.etree import ElementTree as ET

from ddp_doctor.faults import describe
from ddp_doctor.findings import Finding, Report, State, Verdict
from ddp_doctor.output.terminal import counts, headline, outputs, plain, report_text, safe, title_of, told
from ddp_doctor.places import shown_place
from ddp_doctor.versions import VERSION

FORMATS = ("text", "json", "sarif", "github", "junit")
_LEVELS = {Verdict.FAULT: "error", Verdict.DEPENDS: "warning", Verdict.UNCLEAR: "warning", Verdict.NOTE: "note"}
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def formatted(report: Report, form: str, *, verbose: bool = False) -> str:
    """Returns the report in one of `FORMATS`."""
    if form == "json":
        return json.dumps(report.to_json(), indent=2)
    if form == "sarif":
        return json.dumps(_sarif(report), indent=2)
    if form == "github":
        return _annotations(report)
    return _junit(report) if form == "junit" else report_text(report, verbose=verbose)


def _sarif(report: Report) -> dict[str, Any]:
    """Returns the report as a SARIF log of one run; accepted findings are suppressed results."""
    rules = [
        {
            "id": check.code,
            "shortDescription": {"text": f"{check.title}."},
            "fullDescription": {"text": " ".join(check.cause.split())},
            "help": {"text": f"{check.fix.strip()}\n\nReported in {', '.join(check.threads)}"},
        }
        for check in describe().values()
    ]
    results = [_result(finding, report) for finding in report.findings]
    for one in report.accepted:
        kind = "inSource" if one.by == "comment" else "external"
        suppression = {"kind": kind, "justification": plain(one.reason)}
        results.append({**_result(one.finding, report), "suppressions": [suppression]})
    failures = [{"level": "error", "message": {"text": text}} for text in outputs(report).values()]
    invocation = {
        "executionSuccessful": not failures,
        "exitCode": report.exit_code,
        "toolExecutionNotifications": failures,
    }
    driver = {"name": "ddp-doctor", "semanticVersion": VERSION, "rules": rules}
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding, report: Report) -> dict[str, Any]:
    place = shown_place(finding, report)
    # A line may move.
    identity = "\n".join((finding.code, place.path if place else "", place.function if place else ""))
    found: dict[str, Any] = {
        "ruleId": finding.code,
        "level": _LEVELS[finding.verdict],
        "message": {"text": "\n".join(told(finding))},
        "partialFingerprints": {"codeFileFunction/v1": hashlib.sha256(safe(identity).encode()).hexdigest()[:32]},
    }
    if place:
        path = PurePosixPath("/") / safe(place.path)
        where = {"uri": path.as_uri()}
        if not place.path.startswith("/"):
            where = {"uri": path.as_uri().removeprefix("file:///"), "uriBaseId": "%SRCROOT%"}
        physical = {"artifactLocation": where, "region": {"startLine": max(place.line, 1)}}
        found["locations"] = [{"physicalLocation": physical}]
    return found


def _annotations(report: Report) -> str:
    """Returns the findings as commands of a workflow of GitHub."""

    def escaped(text: str) -> str:
        return text.replace("%", "%25").replace("\n", "%0A")

    lines = [headline(report), counts(report)]
    for finding in report.findings:
        place = shown_place(finding, report)
        values = {"file": place.path, "line": str(place.line)} if place else {}
        values["title"] = title_of(finding)
        told_values = [
            f"{name}={escaped(plain(value)).replace(':', '%3A').replace(',', '%2C')}" for name, value in values.items()
        ]
        command = _LEVELS[finding.verdict].replace("note", "notice")
        lines.append(f"::{command} {','.join(told_values)}::{escaped(chr(10).join(told(finding)))}")
    lines += [f"::error title={title}::{escaped(text)}" for title, text in outputs(report).items()]
    return "\n".join(lines)


def _junit(report: Report) -> str:
    """Returns the checks as test cases: faults fail, and checks that were not made are skipped."""
    suite = ET.Element("testsuite", name=f"ddp-doctor {plain(report.target)}", time=f"{report.seconds:.3f}")
    for check in report.checks:
        found = [finding for finding in report.findings if finding.code == check.code]
        known = describe().get(check.code)
        case = ET.SubElement(suite, "testcase", classname="ddp_doctor", name=f"{check.code} {known and known.title}")
        for finding in found:
            text = "\n".join(told(finding))
            if finding.verdict is not Verdict.FAULT:
                ET.SubElement(case, "system-out").text = f"{finding.verdict.value}: {text}"
                continue
            ET.SubElement(case, "failure", type=finding.code, message=plain(finding.message)).text = text
            if place := shown_place(finding, report):
                case.attrib |= {"file": plain(place.path), "line": str(place.line)}
        if check.state is not State.MADE:
            ET.SubElement(case, "skipped", message=f"{check.state.value}: {plain(check.reason)}")
    for text in outputs(report).values():
        case = ET.SubElement(suite, "testcase", classname="ddp_doctor", name="the program runs")
        ET.SubElement(case, "error", message=headline(report)).text = text
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in suite)))
    suite.set("tests", str(len(suite)))
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode")
