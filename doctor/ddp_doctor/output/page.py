"""The report as one self-contained HTML page, without scripts and without network access."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader

from ddp_doctor.faults import describe
from ddp_doctor.findings import Report, State, Verdict
from ddp_doctor.output.drawings import curve_drawing, module_tree, samples_drawing
from ddp_doctor.output.fix_diff import excerpt, is_diff
from ddp_doctor.output.links import page_address
from ddp_doctor.output.terminal import (
    LIMITS,
    NOT_MADE,
    by_reason,
    counts,
    emulation_text,
    facts,
    files_text,
    headline,
    plain,
    safe,
    verdict,
)

_TITLES = {
    Verdict.FAULT: "Faults",
    Verdict.DEPENDS: "Depends on the number of devices",
    Verdict.UNCLEAR: "Unclear",
    Verdict.NOTE: "Notes",
}
# Keeps a number and its unit on one line.
_SPACE = "\u00a0"


def page_of(report: Report) -> str:
    """Returns the page."""
    big, _, words = verdict(report).partition(" ")
    environment = Environment(
        loader=PackageLoader("ddp_doctor.output"),
        autoescape=True,
        finalize=lambda value: safe(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plural=_plural, duration=_duration)
    groups = {title: report.of(kind) for kind, title in _TITLES.items()}
    states = {state.value.capitalize(): by_reason(report.ended(state)) for state in (*NOT_MADE, State.MADE)}
    return environment.get_template("report.html.jinja").render(
        report=report,
        samples=samples_drawing(report),
        curve=curve_drawing(report.comparison),
        method=report.comparison.method if report.comparison else "",
        tree=module_tree(report.comparison),
        excerpt=excerpt,
        is_diff=is_diff,
        headline=(big, words, report.exit_code != 0),
        # The large words say the rest.
        sentence=headline(report) if headline(report) != f"{verdict(report)}." else "",
        counts=counts(report),
        groups={title: found for title, found in groups.items() if found},
        states={title: rows for title, rows in states.items() if rows},
        outputs=[text.rstrip() for text in (report.hang, report.error) if text],
        checks=describe(),
        page_address=page_address,
        facts=facts,
        plain=plain,
        limits=LIMITS,
        files=[*emulation_text(report), *files_text(report.files)],
    )


def _plural(value: int, word: str) -> str:
    return f"{value}{_SPACE}{word}{'' if value == 1 else 's'}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}{_SPACE}min{_SPACE}{rest:02d}{_SPACE}s" if minutes else f"{seconds:.1f}{_SPACE}s"
