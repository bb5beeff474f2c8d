"""Every format of the report links the page of a finding's check, or names the command where no site is known."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from email.message import Message
from xml.etree import ElementTree as ET

import pytest
from doctor_support import Page
from example_report import example, hostile

from ddp_doctor.command import explain
from ddp_doctor.faults import describe
from ddp_doctor.findings import Finding, Verdict
from ddp_doctor.output import links
from ddp_doctor.output.formats import formatted
from ddp_doctor.output.page import page_of
from ddp_doctor.output.sarif import sarif_of
from ddp_doctor.output.terminal import print_text, report_text

SITE = "https://docs.example/lit"
PAGE = f"{SITE}/checks/LD012.html"


def publish(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Installs a package with these addresses."""
    message = Message()
    for address in addresses:
        message["Project-URL"] = address
    monkeypatch.setattr(links.metadata, "metadata", lambda name: message)
    links.site_address.cache_clear()


@pytest.fixture(autouse=True)
def unpublished(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package without addresses."""
    publish(monkeypatch)
    yield
    links.site_address.cache_clear()


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose documentation has an address."""
    publish(monkeypatch, "Repository, https://git.example/a", f"Documentation, {SITE}/")


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(text: str, stream: io.StringIO) -> str:
    print_text(text, stream)
    return stream.getvalue()


def without_marks(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m|\x1b\]8;;[^\x1b]*\x1b\\", "", text)


@pytest.mark.usefixtures("published")
def test_a_terminal_with_colors_links_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    text = report_text(example())
    screen = shown(text, Screen())
    assert f"✗ \x1b]8;;{PAGE}\x1b\\LD012\x1b]8;;\x1b\\ " in screen
    assert screen.count("\x1b]8;;\x1b\\") == 4  # A note is linked as well.
    # The link takes no place on the screen.
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(text, Screen()) == without_marks(screen)


@pytest.mark.usefixtures("published")
def test_a_pipe_names_the_command_and_gets_no_link() -> None:
    text = shown(report_text(example()), io.StringIO())
    assert "\x1b" not in text
    assert SITE not in text
    assert text.rstrip().splitlines()[-1] == "explain   ddp-doctor --explain LD012"


def test_sarif_has_the_page_of_each_rule(published: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = sarif_of(example())["runs"][0]["tool"]["driver"]["rules"]
    assert [rule["helpUri"] for rule in rules] == [f"{SITE}/checks/{code}.html" for code in describe()]
    publish(monkeypatch, "Repository, https://git.example/a")
    assert not any("helpUri" in rule for rule in sarif_of(example())["runs"][0]["tool"]["driver"]["rules"])


@pytest.mark.parametrize("form", ["github", "junit"])
def test_annotations_and_test_cases_say_where_more_is(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        text = formatted(example(), form)
        if form == "github":
            return next(line for line in text.splitlines() if "LD012" in line).rpartition("%0A")[2]
        failure = ET.fromstring(text.encode()).find(".//failure")  # noqa: S314
        assert failure is not None
        return str(failure.text).splitlines()[-1]

    assert told() == "more: ddp-doctor --explain LD012"
    publish(monkeypatch, f"Documentation, {SITE}")
    assert told() == f"more: {PAGE}"


def test_the_page_links_the_code_of_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Page(page_of(example())).find("a")
    publish(monkeypatch, f"documentation, {SITE}")
    page = Page(page_of(example()))
    assert page.balanced
    assert page.find("a")[0]["attrs"] == {"href": PAGE}
    assert [link["text"] for link in page.find("a")] == ["LD012", "LD017", "LD013", "LD032"]
    # A code that is no check's cannot become a part of an address.
    unknown = page_of(example(Finding("LD012/../<b>", Verdict.FAULT, "x")))
    assert not Page(unknown).find("a")
    assert {link["attrs"]["href"] for link in Page(page_of(hostile())).find("a")} == {PAGE}


def test_the_explanation_ends_with_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "page " not in explain("LD012").splitlines()[-1]
    publish(monkeypatch, f"Documentation, {SITE}")
    assert explain("LD012").splitlines()[-1] == f"page      {PAGE}"
