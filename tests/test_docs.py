"""The pages: their commands run, their links resolve, and their site is built; the READMEs have the same numbers.

A block of a page whose first line is `# NAME.py` is a file in the folder in which its bash blocks run, in their order.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from launching import ROOT

BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# ([\w/-]+\.\w+)\n")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorial").glob("*.md")])
PAGES += sorted((ROOT / "doctor" / "docs").glob("*.md"))
# The others start lightning many times.
QUICK = {"docs/tutorial/01-one-process.md", "docs/tutorial/03-ddp.md"}
IGNORED = {".venv", "build", "runs", ".git", ".pytest_cache"}
FOLDERS = sorted(path for path in ROOT.iterdir() if path.is_dir() and path.name not in IGNORED)
TEXTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in folder.rglob("*.md"))])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pages() -> list[object]:
    found = [page for page in PAGES if "```bash\n" in page.read_text()]
    return [pytest.param(p, marks=[] if name(p) in QUICK else pytest.mark.nightly, id=name(p)) for p in found]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", pages())
def test_its_commands_run(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    files = {found[1]: text for _, text in blocks if (found := NAME.match(text))}
    for entry in ("train.py", "configs", "examples"):  # a page is read in a checkout
        if not any(file.split("/")[0] == entry for file in files):
            (tmp_path / entry).symlink_to(ROOT / entry)
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for text in [text for kind, text in blocks if kind == "bash"]:
        words, output = ["bash", "-e", "-c", text], tmp_path / ".output"
        with output.open("w") as file:
            options = {"cwd": tmp_path, "env": environment, "stdout": file, "stderr": file}
            process = subprocess.Popen(words, start_new_session=True, **options)
            try:
                code = process.wait(300)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert code == 0, f"{text}{output.read_text()[-3000:]}"


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ +(.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page", [pytest.param(path, id=name(path)) for path in TEXTS if not IGNORED & {*path.relative_to(ROOT).parts}]
)
def test_its_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)", BLOCK.sub("", page.read_text()))
    generated = {ROOT / "docs" / "cli.md"}
    for target, anchor in links:
        path = (page.parent / target).resolve() if target else page
        assert path.exists() or path in generated, target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path.read_text()), f"{target}#{anchor}"


@pytest.mark.timeout(300)
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")  # the nightly environments of other versions lack it
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    assert (tmp_path / "checks" / "LD036.html").exists()


def test_the_readmes_have_the_same_commands_and_numbers() -> None:
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert BLOCK.findall(english) == BLOCK.findall(chinese)
    for pattern in (r"\d[\d,.]*\d|\d", r"`[^`\n]+`"):
        assert sorted(re.findall(pattern, BLOCK.sub("", english))) == sorted(
            re.findall(pattern, BLOCK.sub("", chinese))
        )
