"""The report as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from lit_mnist.doctor.checks import describe
from lit_mnist.doctor.findings import Report
from lit_mnist.doctor.terminal import LIMITS, MARKS, facts, headline
from lit_mnist.report import html


def write_page(path: Path, report: Report) -> None:
    """Writes the page atomically.

    Args:
        path: The file to write; its folder must exist.
        report: The report.

    Raises:
        OSError: The file cannot be written.
    """
    html.write_page(
        path,
        "lit_mnist.doctor",
        "doctor.html.jinja",
        report=report,
        headline=headline(report),
        findings=[(finding, MARKS[finding.verdict], facts(finding)) for finding in report.findings],
        checks=describe(),
        limits=LIMITS,
    )
