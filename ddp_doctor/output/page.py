"""The report as one self-contained HTML page, without scripts and without network access."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader

from ddp_doctor.checks import describe
from ddp_doctor.findings import Report, Verdict
from ddp_doctor.output.terminal import LIMITS, SHORT, by_message, facts, files_text, headline, plain, safe

_TITLES = {
    Verdict.FAULT: "Faults",
    Verdict.DEPENDS: "Depends on the number of devices",
    Verdict.UNCLEAR: "Unclear",
    Verdict.NOTE: "Notes",
    Verdict.CANNOT_TELL: "Cannot tell",
    Verdict.NOT_REACHED: "Not reached",
}
# Keeps a number and its unit on one line.
_SPACE = "\u00a0"


def page_of(report: Report) -> str:
    """Returns the page."""
    big, _, words = headline(report).partition(" ")
    environment = Environment(
        loader=PackageLoader("ddp_doctor.output"),
        autoescape=True,
        finalize=lambda value: safe(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plural=_plural, duration=_duration)
    groups = {_TITLES[verdict]: report.of(verdict) for verdict in Verdict if verdict not in SHORT}
    short = {_TITLES[verdict]: by_message(report.of(verdict)) for verdict in SHORT}
    return environment.get_template("report.html.jinja").render(
        report=report,
        headline=(big.capitalize(), words, report.exit_code != 0),
        groups={title: found for title, found in groups.items() if found},
        short={title: rows for title, rows in short.items() if rows},
        outputs=[text.rstrip() for text in (report.hang, report.error) if text],
        checks=describe(),
        facts=facts,
        plain=plain,
        limits=LIMITS,
        files=files_text(report.files),
    )


def _plural(value: int, word: str) -> str:
    return f"{value}{_SPACE}{word}{'' if value == 1 else 's'}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}{_SPACE}min{_SPACE}{rest:02d}{_SPACE}s" if minutes else f"{seconds:.1f}{_SPACE}s"
