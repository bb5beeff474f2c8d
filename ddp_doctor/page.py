"""The report as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from ddp_doctor.checks import describe
from ddp_doctor.findings import Report, Verdict
from ddp_doctor.terminal import LIMITS, SHORT, by_message, facts, files_text, headline, plain, safe
from lit_mnist.report import html
from lit_mnist.report.table import Entry

_TITLES = {
    Verdict.FAULT: "Faults",
    Verdict.DEPENDS: "Depends on the number of devices",
    Verdict.UNCLEAR: "Unclear",
    Verdict.NOTE: "Notes",
    Verdict.CANNOT_TELL: "Cannot tell",
    Verdict.NOT_REACHED: "Not reached",
}


def write_page(path: Path, report: Report) -> None:
    """Writes the page atomically.

    Args:
        path: The file to write; its folder must exist.
        report: The report.

    Raises:
        OSError: The file cannot be written.
    """
    big, _, words = headline(report).partition(" ")
    groups = {_TITLES[verdict]: report.of(verdict) for verdict in Verdict if verdict not in SHORT}
    short = {
        _TITLES[verdict]: [Entry(", ".join(codes), text) for text, codes in by_message(report.of(verdict)).items()]
        for verdict in SHORT
    }
    html.write_page(
        path,
        "ddp_doctor",
        "doctor.html.jinja",
        report=report,
        headline=(big.capitalize(), words, report.exit_code != 0),
        groups={title: found for title, found in groups.items() if found},
        short={title: rows for title, rows in short.items() if rows},
        outputs=[safe(text.rstrip()) for text in (report.hang, report.error) if text],
        versions=[(plain(name), plain(version)) for name, version in report.versions.items()],
        checks=describe(),
        facts=facts,
        plain=plain,
        limits=LIMITS,
        files=[plain(text) for text in files_text(report.files)],
    )
