"""The report as SARIF 2.1.0, which code scanning of GitHub and many editors read. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from ddp_doctor.faults import Description, describe
from ddp_doctor.findings import Accepted, Finding, Report, Verdict
from ddp_doctor.output.links import page_address
from ddp_doctor.output.terminal import facts, headline, plain, safe
from ddp_doctor.places import shown_place
from ddp_doctor.versions import VERSION

_LEVELS = {Verdict.FAULT: "error", Verdict.DEPENDS: "warning", Verdict.UNCLEAR: "warning", Verdict.NOTE: "note"}
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif_of(report: Report) -> dict[str, Any]:
    """Returns the report as a SARIF log of one run; accepted findings are suppressed results."""
    codes = list(describe())
    results = [_result(finding, report, codes) for finding in report.findings]
    results += [_result(one.finding, report, codes, one) for one in report.accepted]
    failures = [text for text in (report.hang, report.error) if text]
    run = {
        "tool": {
            "driver": {
                "name": "ddp-doctor",
                "semanticVersion": VERSION,
                "rules": [_rule(check) for check in describe().values()],
            }
        },
        "invocations": [
            {
                "executionSuccessful": not failures,
                "exitCode": report.exit_code,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": safe(text.rstrip()[-6000:])}} for text in failures
                ],
            }
        ],
        "results": results,
        "properties": {
            "headline": headline(report),
            "checks": [
                {"code": check.code, "state": check.state.value, "reason": plain(check.reason)}
                for check in report.checks
            ],
        },
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(check: Description) -> dict[str, Any]:
    fix, threads = check.fix.strip(), ", ".join(check.threads)
    page = page_address(check.code)
    return {
        "id": check.code,
        "name": "".join(word.capitalize() for word in check.module.split("_")),
        "shortDescription": {"text": f"{check.title}."},
        "fullDescription": {"text": " ".join(check.cause.split())},
        "help": {
            "text": f"{fix}\n\nReported in {threads}",
            "markdown": f"{' '.join(check.cause.split())}\n\n**Fix.** {_with_code(fix)}\n\nReported in {threads}",
        },
        **({"helpUri": page} if page else {}),
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["distributed-training", "structural" if check.structural else "numeric"]},
    }


def _with_code(fix: str) -> str:
    """Returns a fix with its lines of code as blocks of Markdown."""
    found, inside = [], False
    for line in fix.splitlines():
        if line.startswith(" ") is not inside:
            found.append("```" if inside else "```python")
            inside = not inside
        found.append(line.removeprefix("    "))
    return "\n".join([*found, "```"] if inside else found)


def _result(finding: Finding, report: Report, codes: Sequence[str], accepted: Accepted | None = None) -> dict[str, Any]:
    parts = [finding.message, finding.proof, "; ".join(facts(finding))]
    place = shown_place(finding, report)
    found: dict[str, Any] = {
        "ruleId": finding.code,
        "level": _LEVELS[finding.verdict],
        "message": {"text": "\n".join(plain(part) for part in parts if part)},
        "partialFingerprints": {"codeFileFunction/v1": _fingerprint(finding, report)},
        "properties": {"verdict": finding.verdict.value},
    }
    if finding.code in codes:
        found["ruleIndex"] = codes.index(finding.code)
    if place:
        path = PurePosixPath(safe(place.path))
        where = {"uri": path.as_uri()} if path.is_absolute() else {"uri": _quoted(path), "uriBaseId": "%SRCROOT%"}
        physical = {"artifactLocation": where, "region": {"startLine": max(place.line, 1)}}
        logical = [{"name": plain(place.function), "kind": "function"}] if place.function else []
        found["locations"] = [{"physicalLocation": physical, **({"logicalLocations": logical} if logical else {})}]
    if accepted:
        kind = "inSource" if accepted.by == "comment" else "external"
        found["suppressions"] = [{"kind": kind, "justification": plain(accepted.reason)}]
    return found


def _quoted(path: PurePosixPath) -> str:
    return (PurePosixPath("/") / path).as_uri().removeprefix("file:///")


def _fingerprint(finding: Finding, report: Report) -> str:
    place = shown_place(finding, report)
    parts = (finding.code, place.path if place else "", place.function if place else "")
    return hashlib.sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:32]
