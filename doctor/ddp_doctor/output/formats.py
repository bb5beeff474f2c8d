"""The report for others: JSON, SARIF, GitHub's annotations and comments, JUnit. Imports no torch."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from ddp_doctor.accepted import key_of, shown_place
from ddp_doctor.errors import InputError
from ddp_doctor.faults import load_checks
from ddp_doctor.findings import MADE, Finding, Report, Verdict
from ddp_doctor.output.terminal import (
    MARKS,
    by_reason,
    counts,
    examined,
    headline,
    outputs,
    plain,
    remarks,
    report_text,
    safe,
    title_of,
    told,
)
from ddp_doctor.versions import VERSION

FORMATS = ("text", "json", "sarif", "github", "junit", "markdown")
_LEVELS = {Verdict.FAULT: "error", Verdict.DEPENDS: "warning", Verdict.UNCLEAR: "warning", Verdict.NOTE: "note"}
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LONGEST_COMMENT = 30
# Code, which stays; what GitHub links, mentions of people and numbers of issues; and what Markdown would format.
_MARKUP = re.compile(r"(?P<code>(?<!`)`[^`]+`(?!`))|(?P<link>[@#][\w-]*)|[\\`*_\[\]<>~|$&!]|^[-+=]")


def formatted(report: Report, form: str, *, verbose: bool = False, before: Report | None = None) -> str:
    """Returns the report in one of `FORMATS`.

    Args:
        report: The report.
        form: The format.
        verbose: Whether `text` lists every check.
        before: The report before a change, with which `markdown` compares.
    """
    if form in {"json", "sarif"}:
        return json.dumps(_sarif(report) if form == "sarif" else report.to_json(), indent=2)
    if form == "text":
        return report_text(report, verbose=verbose)
    return _comment(report, before) if form == "markdown" else {"github": _annotations, "junit": _junit}[form](report)


def _sarif(report: Report) -> dict[str, Any]:
    """Returns the report as a SARIF log of one run; accepted findings are suppressed results."""
    rules = [
        {
            "id": code,
            "shortDescription": {"text": f"{check.TITLE}."},
            "fullDescription": {"text": " ".join(check.CAUSE.split())},
            "help": {"text": f"{check.FIX.strip()}\n\nReported in {', '.join(check.THREADS)}"},
        }
        for code, check in load_checks().items()
    ]
    results = [_result(finding, report) for finding in report.findings]
    for one in report.accepted:
        kind = "inSource" if one.by == "comment" else "external"
        suppression = {"kind": kind, "justification": plain(one.reason)}
        results.append({**_result(one.finding, report), "suppressions": [suppression]})
    failures = [{"level": "error", "message": {"text": text}} for text in outputs(report).values()]
    invocation = {"executionSuccessful": not failures, "toolExecutionNotifications": failures}
    driver = {"name": "ddp-doctor", "semanticVersion": VERSION, "rules": rules}
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding, report: Report) -> dict[str, Any]:
    message = {"text": "\n".join(told(finding))}
    found: dict[str, Any] = {"ruleId": finding.code, "level": _LEVELS[finding.verdict], "message": message}
    if place := shown_place(finding, report):
        uri = quote(safe(place.path))
        where = {"uri": f"file://{uri}"} if uri.startswith("/") else {"uri": uri, "uriBaseId": "%SRCROOT%"}
        physical = {"artifactLocation": where, "region": {"startLine": max(place.line, 1)}}
        found["locations"] = [{"physicalLocation": physical}]
    return found


def _annotations(report: Report) -> str:
    """Returns the findings as commands of a workflow of GitHub."""

    def escaped(text: str) -> str:
        return text.replace("%", "%25").replace("\n", "%0A")

    def valued(text: str) -> str:
        return escaped(plain(text)).replace(":", "%3A").replace(",", "%2C")

    lines = [headline(report), counts(report)]
    for finding in report.findings:
        place = shown_place(finding, report)
        where = f"file={valued(place.path)},line={place.line}," if place else ""
        command = f"{_LEVELS[finding.verdict].replace('note', 'notice')} {where}title={valued(title_of(finding.code))}"
        lines.append(f"::{command}::{escaped(chr(10).join(told(finding)))}")
    lines += [f"::error title={title}::{escaped(text)}" for title, text in outputs(report).items()]
    return "\n".join(lines)


def _junit(report: Report) -> str:
    """Returns the checks as test cases: faults fail, and checks that were not made are skipped."""
    suite = ET.Element("testsuite", name=f"ddp-doctor {plain(report.target)}", time=f"{report.seconds:.3f}")
    for check in report.checks:
        case = ET.SubElement(suite, "testcase", classname="ddp_doctor", name=title_of(check.code))
        for finding in (finding for finding in report.findings if finding.code == check.code):
            text = "\n".join(told(finding))
            if finding.verdict is not Verdict.FAULT:
                ET.SubElement(case, "system-out").text = f"{finding.verdict.value}: {text}"
                continue
            ET.SubElement(case, "failure", type=finding.code, message=plain(finding.message)).text = text
            if place := shown_place(finding, report):
                case.attrib |= {"file": plain(place.path), "line": str(place.line)}
        if check.state != MADE:
            ET.SubElement(case, "skipped", message=f"{check.state}: {plain(check.reason)}")
    for text in outputs(report).values():
        case = ET.SubElement(suite, "testcase", classname="ddp_doctor", name="the program runs")
        ET.SubElement(case, "error", message=headline(report)).text = text
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in suite)))
    suite.set("tests", str(len(suite)))
    ET.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="unicode")


def read_report(path: str) -> Report:
    """Returns the target, the findings and the errors of a report that `--json` wrote.

    Raises:
        InputError: It is no report.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        findings = [Finding(**{**row, "verdict": Verdict(row["verdict"])}) for row in content["findings"]]
        return Report(content["target"], content["devices"], findings, error=content["error"], hang=content["hang"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--before {path} is no report of --json: {type(error).__name__}: {error}") from error


def _comment(report: Report, before: Report | None) -> str:
    """Returns the report as a comment of a pull request."""
    error = "\n".join(outputs(report).values()).splitlines()[-5:]
    head = [f"### ddp-doctor: {_escaped(headline(report))}", "", f"{_escaped(examined(report))}; {counts(report)}"]
    head += ["", *(f"    {line}" for line in error)] if error else []
    known = {key_of(finding): finding.verdict.value for finding in before.findings} if before else {}
    rows, tail = [], []
    for finding in report.findings:
        since = f", before: {known.get(key_of(finding), 'not found')}" if before else ""
        rows.append(_row(MARKS[finding.verdict], finding, f"{finding.verdict.value}{since}"))
    if before:
        now = {key_of(finding) for finding in report.findings}
        gone = [_gone(finding, report) for finding in before.findings if key_of(finding) not in now]
        tail += ["", f"**Before:** {_escaped(headline(before))} {_escaped(examined(before))}", *_first(gone, 3)]
    left = [f"- {', '.join(codes)}: {_escaped(why)}" for why, codes in by_reason(report, Verdict.CANNOT_TELL).items()]
    limits = " ".join(remarks(report)) if report.devices else "The program was only read, not run."
    tail += ["", "**Not examined:**", *_first(left, 3), f"- {_escaped(limits)}"]
    room = _LONGEST_COMMENT - len(head) - len(tail) - 2
    return "\n".join([*head, "", *_first(rows, room), *tail])


def _gone(finding: Finding, report: Report) -> str:
    """Returns what became of a finding that is no longer there: only a check that was made tells."""
    if key_of(finding) in {key_of(one.finding) for one in report.accepted}:
        return _row("·", finding, "accepted now")
    made = finding.code in {check.code for check in report.ended(MADE)}
    return _row("✓", finding, "no longer found") if made else _row("?", finding, "not examined now")


def _row(mark: str, finding: Finding, what: str) -> str:
    return f"- {mark} " + "<br>".join([f"**{title_of(finding.code)}** ({what})", *map(_escaped, told(finding))])


def _first(rows: list[str], most: int) -> list[str]:
    return [*rows[:most], *([f"- and {len(rows) - most} more"] if len(rows) > most else [])]


def _escaped(text: str) -> str:
    """Returns a text on one line that GitHub shows as it is."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if found["code"] else f"`{found[0]}`" if found["link"] else f"\\{found[0]}"

    return _MARKUP.sub(shown, plain(text))
