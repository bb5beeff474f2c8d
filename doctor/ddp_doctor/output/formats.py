"""The report for others: JSON, SARIF, GitHub's annotations and comments, JUnit. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree as ET

from ddp_doctor.accepted import key_of, shown_place
from ddp_doctor.errors import InputError
from ddp_doctor.faults import load_checks, short_fix
from ddp_doctor.findings import MADE, Finding, Report, Verdict
from ddp_doctor.output.terminal import (
    MARKS,
    by_reason,
    counts,
    examined,
    facts,
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
            "id": check.CODE,
            "shortDescription": {"text": f"{check.TITLE}."},
            "fullDescription": {"text": " ".join(check.CAUSE.split())},
            "help": {"text": f"{check.FIX.strip()}\n\nReported in {', '.join(check.THREADS)}"},
        }
        for check in load_checks().values()
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
        known = load_checks().get(check.code)
        case = ET.SubElement(suite, "testcase", classname="ddp_doctor", name=f"{check.code} {known and known.TITLE}")
        for finding in found:
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
        if content["format"] != 2:
            raise ValueError(f"its format is {content['format']!r}, but 2 is known")
        findings = [Finding(**{**row, "verdict": Verdict(row["verdict"])}) for row in content["findings"]]
        return Report(content["target"], content["devices"], findings, error=content["error"], hang=content["hang"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--before {path} is no report of --json: {type(error).__name__}: {error}") from error


def _comment(report: Report, before: Report | None) -> str:
    """Returns the report as a comment of a pull request."""
    head = [f"### ddp-doctor: {_escaped(headline(report))}", "", f"{_escaped(examined(report))}; {counts(report)}"]
    error = "\n".join(outputs(report).values()).splitlines()[-5:]
    head += ["", *(f"    {line}" for line in error)] if error else []
    tail = []
    known = {key_of(finding): finding.verdict for finding in before.findings} if before else {}
    if before:
        now = {key_of(finding) for finding in report.findings}
        gone = [_gone(finding, report) for finding in before.findings if key_of(finding) not in now]
        tail += ["", f"**Before:** {_escaped(headline(before))} {_escaped(examined(before))}", *_first(gone, 3)]
    left = [f"- {', '.join(codes)}: {_escaped(why)}" for why, codes in by_reason(report, Verdict.CANNOT_TELL).items()]
    for state in (Verdict.NOT_APPLICABLE, Verdict.NOT_REACHED):
        if checks := report.ended(state):
            left.append(f"- {state}: {', '.join(check.code for check in checks)}")
    limits = " ".join(remarks(report)) if report.devices else "The program was only read, not run."
    tail += ["", "**Not examined:**", *_first(left, 3), f"- {_escaped(limits)}"]
    rows = []
    for finding in report.findings:
        since = known.get(key_of(finding))
        told_before = f", before: {since.value if since else 'not found'}" if before else ""
        title = f"- {MARKS[finding.verdict]} {_named(finding)} ({finding.verdict.value}{told_before})"
        rows.append(f"{title}\n  {_evidence(finding)}\n  Fix: {short_fix(load_checks()[finding.code])}")
    room = _LONGEST_COMMENT - len(head) - len(tail) - 1
    return "\n".join([*head, *([""] if rows else []), *_first(rows, (room - 1) // 3), *tail])


def _gone(finding: Finding, report: Report) -> str:
    """Returns what became of a finding that is no longer there: only a check that was made tells."""
    if key_of(finding) in {key_of(one.finding) for one in report.accepted}:
        now = "· accepted now"
    else:
        made = finding.code in {check.code for check in report.ended(MADE)}
        now = "✓ no longer found" if made else "? not examined now"
    return f"- {now}: {_named(finding)}: {_evidence(finding)}"


def _named(finding: Finding) -> str:
    place = f" at {_escaped(finding.place)}" if finding.place else ""
    return f"**{_escaped(title_of(finding))}**{place}"


def _evidence(finding: Finding) -> str:
    parts = (finding.message.strip().rstrip("."), finding.proof, facts(finding))
    return _escaped("; ".join(part for part in parts if part))


def _first(rows: list[str], most: int) -> list[str]:
    return [*rows[:most], *([f"- and {len(rows) - most} more"] if len(rows) > most else [])]


def _escaped(text: str) -> str:
    """Returns a text on one line that GitHub shows as it is."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if found["code"] else f"`{found[0]}`" if found["link"] else f"\\{found[0]}"

    return _MARKUP.sub(shown, plain(text))
