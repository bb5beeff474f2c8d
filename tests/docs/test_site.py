"""The documentation is built without a warning, and a link that leads nowhere fails it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import layout
import pytest
import yaml
from conftest import ROOT
from docs_site import build_site, shared_site
from mkdocs.config.defaults import MkDocsConfig

import ddp_doctor
import lit_mnist.plugins
from ddp_doctor.checks import describe

# What the pages link to.
PROJECT = (ROOT / "pyproject.toml").read_text()
PARTS = ("docs", "lit_mnist", "ddp_doctor", "examples", "tests", "benchmarks", "configs", ".github", ".vscode")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout whose pages may be changed."""
    for part in PARTS:
        shutil.copytree(
            ROOT / part, tmp_path / "copy" / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_pages_are_built_without_a_warning(tmp_path_factory: pytest.TempPathFactory) -> None:
    site = shared_site(tmp_path_factory)
    assert "Exact evaluation" in (site / "tutorial" / "05-evaluation.html").read_text()


# What is a warning each, and what is told of it.
NOWHERE = {
    "[a page](nowhere.md)": "link 'nowhere.md'",
    "[a heading](promises.md#nowhere)": "#nowhere",
    "[a file](../lit_mnist/nowhere.py)": "nowhere.py",
}


@pytest.mark.parametrize(
    "links",
    [
        pytest.param(NOWHERE, id="each"),
        {"[`nothing` in `train.py`](../train.py)": "train.py has no nothing"},
        *(pytest.param({text: told}, id=text, marks=pytest.mark.slow) for text, told in NOWHERE.items()),
    ],
)
def test_a_link_that_leads_nowhere_fails(checkout: Path, tmp_path: Path, links: dict[str, str]) -> None:
    with (checkout / "docs" / "questions.md").open("a") as page:
        page.write("".join(f"\n\n{text}\n" for text in links))
    done = build_site(tmp_path / "site", checkout)
    assert done.returncode == 1, done.stderr
    output = done.stdout + done.stderr
    assert [told for told in links.values() if told not in output] == []
    if links is NOWHERE:
        assert f"Aborted with {len(NOWHERE)} warnings" in output


def entries_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in entries_of(entry)]


def settings() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return loaded


def test_the_navigation_has_every_page_except_the_dated_notes() -> None:
    named = set(entries_of(settings()["nav"]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages - named if not page.startswith("notes/")} == set()
    assert not [page for page in named if page.startswith("notes/")]


def test_each_check_has_a_page_in_the_navigation() -> None:
    config = MkDocsConfig()
    config.load_dict(settings())
    layout.on_config(config)
    assert {f"checks/{code}.md" for code in describe()} <= set(entries_of(config.nav))


def test_the_addresses_come_from_one_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def configured() -> MkDocsConfig:
        config = MkDocsConfig()
        config.load_dict(settings())
        config.theme = {"features": []}
        return layout.on_config(config)

    monkeypatch.delenv("LIT_MNIST_REPOSITORY", raising=False)
    monkeypatch.setattr(layout, "PROJECT", tmp_path / "pyproject.toml")
    setting = re.compile(r'^(?:# )?(Repository|Documentation) = ".*"$', re.MULTILINE)
    layout.PROJECT.write_text(setting.sub("", PROJECT))
    config = configured()
    assert not config.repo_url
    assert not config.site_url
    layout.PROJECT.write_text(setting.sub(r'\1 = "https://docs.example/\1"', PROJECT))
    config = configured()
    assert (config.repo_url, config.site_url) == (
        "https://docs.example/Repository",
        "https://docs.example/Documentation/",
    )
    monkeypatch.setenv("LIT_MNIST_REPOSITORY", "https://git.example/someone/a_name/")
    config = configured()
    assert (config.repo_url, config.repo_name) == ("https://git.example/someone/a_name", "someone/a_name")
    assert config.edit_uri == "edit/main/docs/"
    assert config.theme["features"] == ["content.action.edit"]


def test_a_table_with_a_long_text_names_its_columns_in_each_cell() -> None:
    row = "<tr><td>{}</td><td>b</td></tr>"
    table = f"<table><thead><tr><th>one</th><th><code>two</code></th></tr></thead><tbody>{row}</tbody></table>"
    assert layout.labeled(table.format("short")) == table.format("short")
    text = "a long text " * 10
    assert f'<td data-label="one">{text}</td><td data-label="two">b</td>' in layout.labeled(table.format(text))


def test_the_pages_of_the_api_have_every_public_name() -> None:
    listed = {
        name.rpartition(".")[2]
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    public = {*lit_mnist.__all__, *lit_mnist.plugins.__all__, *ddp_doctor.__all__, "examine_command", "watch"}
    assert public <= listed
