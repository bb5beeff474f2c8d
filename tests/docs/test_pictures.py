"""The pictures are what their scripts draw, and the README shows what its programs print."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ROOT

PICTURES = ROOT / "docs" / "pictures"
SCRIPTS = sorted(path for path in PICTURES.glob("*.py") if path.name != "svg.py")
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUARANTEES = ROOT / "examples" / "guarantees"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


@pytest.mark.usefixtures("forked_python")
def test_each_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    """The scripts draw into a copy of their folder."""
    copy = tmp_path / "docs" / "pictures"
    copy.mkdir(parents=True)
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    copy.with_name("bench").symlink_to(ROOT / "docs" / "bench")
    for path in PICTURES.iterdir():
        if path.suffix in {".py", ".txt", ".json"}:
            (copy / path.name).write_bytes(path.read_bytes())
    for script in SCRIPTS:
        subprocess.run([sys.executable, str(copy / script.name)], check=True, timeout=60)
    drawn, committed = ({path.name: path.read_text() for path in folder.glob("*.svg")} for folder in (copy, PICTURES))
    assert drawn
    assert drawn == committed


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_a_title_and_can_be_read_on_a_telephone(picture: Path) -> None:
    """At a width of 358 pixels, which a page of 390 leaves, no text is smaller than 9 pixels."""
    root = ElementTree.fromstring(picture.read_text())  # noqa: S314 (a file of the repository)
    name = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{name}title")
    sizes = [float(text.attrib["font-size"]) for text in root.iter(f"{name}text")]
    assert min(sizes) * min(1, 358 / float(root.attrib["width"])) >= 9


def test_each_image_of_a_page_exists_and_has_an_alternative_text() -> None:
    shown = set()
    for page in PAGES:
        for words, target in IMAGE.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page, target)
            assert len(words.split()) > 5, (page, target)
            shown.add((page.parent / target).resolve())
    assert set(PICTURES.glob("*.svg")) <= shown


def test_the_gallery_is_small_and_names_no_folder_of_a_machine() -> None:
    files = [path for path in (ROOT / "docs" / "gallery").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    pages = [path.read_text(encoding="utf-8") for path in files if path.suffix == ".html"]
    assert len(pages) >= 4
    assert not [page for page in pages if re.search(r"/(?:tmp|home|root)/|\.venv", page)]


def test_the_readme_shows_the_two_programs_that_it_runs() -> None:
    (block,) = re.findall(r"^```diff\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    removed, added, kept = ([line[1:] for line in block.splitlines() if line[0] == mark] for mark in "-+ ")
    assert len(removed) + len(added) + len(kept) == len(block.splitlines())
    before, after = ((GUARANTEES / name).read_text().splitlines()[2:] for name in ("before.py", "after.py"))
    assert {*removed, *kept} <= set(before)
    assert {*added, *kept} <= set(after)
    assert [line for line in before if line not in removed] == [line for line in after if line not in added]


def test_the_picture_of_the_readme_is_of_its_command() -> None:
    script = (PICTURES / "doctor.py").read_text()
    (command,) = re.findall(r'^COMMAND = "(.*)"$', script, re.MULTILINE)
    assert f"```bash\n{command}\n```" in README


@pytest.mark.slow
def test_a_killed_run_prints_what_the_readme_shows() -> None:
    command, *shown = re.search(r"^```\n\$ (python examples/guarantees/.*?)^```", README, re.DOTALL | re.MULTILINE)[
        1
    ].splitlines()
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=290)
    number = re.compile(r"\d+\.\d+")
    assert [number.sub("N", line) for line in done.stdout.splitlines()] == [number.sub("N", line) for line in shown]


@pytest.mark.slow
def test_the_doctor_finds_what_its_picture_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddp_doctor import examine

    monkeypatch.chdir(ROOT)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    words = ("--standalone", "--nproc-per-node", "2", "examples/doctor/train.py")
    report = examine(command=(torchrun, *words), timeout=200)
    text = (PICTURES / "doctor.txt").read_text(encoding="utf-8")
    assert [finding.code for finding in report.findings] == re.findall(r"^[✗≈] (LD\d+)", text, re.MULTILINE)
