"""The documentation is built without a warning, and a link that leads nowhere fails it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from docs_site import build_site

# What the pages link to.
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


def test_the_pages_are_built_without_a_warning(checkout: Path, tmp_path: Path) -> None:
    done = build_site(tmp_path / "site", checkout)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert "Exact evaluation" in (tmp_path / "site" / "tutorial" / "05-evaluation.html").read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a page](nowhere.md)", "nowhere.md"),
        ("[a heading](promises.md#nowhere)", "#nowhere"),
        ("[a file](../lit_mnist/nowhere.py)", "nowhere.py"),
        ("[`nothing` in `train.py`](../train.py)", "train.py has no nothing"),
    ],
)
def test_a_link_that_leads_nowhere_fails(checkout: Path, tmp_path: Path, text: str, told: str) -> None:
    with (checkout / "docs" / "questions.md").open("a") as page:
        page.write(f"\n\n{text}\n")
    done = build_site(tmp_path / "site", checkout)
    assert done.returncode == 1, done.stderr
    assert told in done.stdout + done.stderr
