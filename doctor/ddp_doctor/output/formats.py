"""The report for other programs: JSON, SARIF, GitHub's annotations, JUnit. Imports no torch."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

from ddp_doctor.faults import describe
from ddp_doctor.findings import Finding, Report, State, Verdict
from ddp_doctor.output.links import page_address
from ddp_doctor.output.sarif import sarif_of
from ddp_doctor.output.terminal import counts, facts, headline, plain, report_text, safe
from ddp_doctor.places import shown_place

FORMATS = ("text", "json", "sarif", "github", "junit")
_ANNOTATIONS = {Verdict.FAULT: "error", Verdict.DEPENDS: "warning", Verdict.UNCLEAR: "warning", Verdict.NOTE: "notice"}


def formatted(report: Report, form: str, program: str = "ddp-doctor", *, verbose: bool = False) -> str:
    """Returns the report in one of `FORMATS`."""
    if form == "json":
        return json.dumps(report.to_json(), indent=2)
    if form == "sarif":
        return json.dumps(sarif_of(report), indent=2)
    if form == "github":
        return "\n".join(_annotations(report))
    return _junit(report) if form == "junit" else report_text(report, program, verbose=verbose)


def _annotations(report: Report) -> list[str]:
    """Returns the findings as commands of a workflow of GitHub."""
    lines = [headline(report), counts(report)]
    for finding in report.findings:
        place = shown_place(finding, report)
        where = [f"file={_property(place.path)}", f"line={place.line}"] if place else []
        values = ",".join([*where, f"title={_property(_title(finding))}"])
        lines.append(f"::{_ANNOTATIONS[finding.verdict]} {values}::{_data(_told(finding))}")
    for title, text in (("The ranks", report.hang), ("The error", report.error)):
        if text:
            lines.append(f"::error title={title}::{_data(safe(text.rstrip()[-6000:]))}")
    return lines


def _junit(report: Report) -> str:
    """Returns the checks as test cases: faults fail, and checks that were not made are skipped."""
    name = plain(report.target)
    suite = ET.Element("testsuite", name=f"ddp-doctor {name}", time=f"{report.seconds:.3f}")
    failures = 0
    for check in report.checks:
        found = [finding for finding in report.findings if finding.code == check.code]
        known = describe().get(check.code)
        case = ET.SubElement(suite, "testcase", classname="ddp_doctor", name=f"{check.code} {known and known.title}")
        case.set("time", "0")
        if place := next((place for finding in found if (place := shown_place(finding, report))), None):
            case.set("file", plain(place.path))
            case.set("line", str(place.line))
        faults = [finding for finding in found if finding.verdict is Verdict.FAULT]
        failures += bool(faults)
        for finding in faults[:1]:
            failure = ET.SubElement(case, "failure", type=finding.code, message=plain(finding.message))
            failure.text = _told(finding)
        if check.state is not State.MADE:
            ET.SubElement(case, "skipped", message=f"{check.state.value}: {plain(check.reason)}")
        others = [f"{finding.verdict.value}: {_told(finding)}" for finding in found if finding not in faults]
        if others:
            ET.SubElement(case, "system-out").text = "\n".join(others)
    errors = [text for text in (report.hang, report.error) if text]
    for text in errors:
        case = ET.SubElement(suite, "testcase", classname="ddp_doctor", name="the program runs", time="0")
        ET.SubElement(case, "error", message=headline(report)).text = safe(text.rstrip()[-6000:])
    skipped = sum(check.state is not State.MADE for check in report.checks)
    numbers = {"tests": len(report.checks) + len(errors), "failures": failures, "errors": len(errors)}
    for key, number in {**numbers, "skipped": skipped}.items():
        suite.set(key, str(number))
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode")


def _title(finding: Finding) -> str:
    check = describe().get(finding.code)
    return f"{plain(finding.code)} {check.title if check else finding.verdict.value}"


def _told(finding: Finding) -> str:
    """Returns the evidence, the numbers, the place, the fix and the page of the check, a line each."""
    check = describe().get(finding.code)
    place = f"at {plain(finding.place)}" if finding.place else ""
    lines = [plain(finding.message), plain(finding.proof), "; ".join(facts(finding)), place]
    if check:
        more = page_address(check.code) or f"ddp-doctor --explain {check.code}"
        lines += [f"fix: {check.short_fix}", f"more: {more}"]
    return "\n".join(line for line in lines if line)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(plain(text)).replace(":", "%3A").replace(",", "%2C")
