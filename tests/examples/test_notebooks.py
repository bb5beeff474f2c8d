"""The notebooks run from top to bottom in a new kernel, in any folder, and print what their text says."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from conftest import CHILD_ENV, ROOT, wait_for

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
TIMEOUT = 240
# Marks the kernel and all processes that it starts.
MARK = "LIT_MNIST_TEST_NOTEBOOK"


@dataclass(frozen=True)
class Executed:
    """The outputs of an executed notebook.

    Attributes:
        printed: Standard output and standard error of all cells.
        pages: HTML outputs.
        images: Number of images.
    """

    printed: str
    pages: list[str]
    images: int

    def number(self, pattern: str) -> float:
        """Returns the number in the first match of a pattern."""
        found = re.search(pattern, self.printed)
        assert found, f"{pattern!r} is not in\n{self.printed}"
        return float(found[1].replace(",", ""))


def execute(name: str, folder: Path) -> Executed:
    """Executes a notebook in an empty folder, which it must leave empty, without leaving a process."""
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / f"{name}.ipynb", as_version=4)
    for part in ("work", "temporary", "jupyter"):
        (folder / part).mkdir()
    environment = {
        **CHILD_ENV,
        MARK: str(folder),
        "TMPDIR": str(folder / "temporary"),
        "IPYTHONDIR": str(folder / "jupyter"),
    }
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder / "work")}}
    )
    client.execute(env=environment)
    wait_for(lambda: not marked(folder), 10)
    assert not list((folder / "work").iterdir())
    assert not list((folder / "temporary").glob("lit_mnist-*"))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    data: list[Any] = [output.data for output in outputs if "data" in output]
    return Executed(
        printed="".join(output.text for output in outputs if output.output_type == "stream"),
        pages=[entry["text/html"] for entry in data if "text/html" in entry],
        images=sum("image/png" in entry for entry in data),
    )


def marked(folder: Path) -> list[int]:
    """Returns the processes that a notebook in this folder has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={folder}".encode() in environment:
                found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def separate_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not [cell.id for cell in code if cell.outputs or cell.execution_count is not None or cell.metadata]
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].source.startswith("# ")


def rows(page: str) -> list[list[str]]:
    """Returns the cells of the tables of a page, as text."""
    found = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return [[unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in found]


def test_the_collectives(tmp_path: Path) -> None:
    done = execute("collectives", tmp_path)
    shown = {str(re.search(r"<b>(.*?)</b>", page)[1]): rows(page)[1:] for page in done.pages}  # type: ignore[index]
    assert len(shown) == 9
    assert shown["broadcast"] == [[f"rank {r}", f"[{10 * r + 1} {10 * r + 2}]", "→", "[1 2]"] for r in range(3)]
    assert [row[3] for row in shown["all-reduce"]] == ["[33 36]"] * 3
    assert [row[3] for row in shown["reduce-scatter"]] == ["[33 36]", "[39 42]", "[45 48]"]
    assert [row[3] for row in shown["all-to-all"]] == ["[1] [11] [21]", "[2] [12] [22]", "[3] [13] [23]"]
    processes = re.findall(r"process (\d+)\n", done.printed)
    assert len(set(processes)) == len(processes) == 4
    assert "equal on each rank: [True, True, True]" in done.printed
    equal, wrong, weighted = re.findall(r"differs from the whole batch by (\S+)", done.printed)
    assert float(equal) < 1e-12
    assert float(weighted) < 1e-12
    assert float(wrong) > 0.01
    sent = re.findall(r"sends +([\d,]+) bytes in the ring, +([\d,]+) bytes with a server", done.printed)
    assert [int(server.replace(",", "")) for _, server in sent] == [8_000_000, 4_000_000, 4_000_000]
    assert sum(int(ring.replace(",", "")) for ring, _ in sent) == 16_000_000
    assert "timed out after 2." in done.printed
    assert done.images == 1


@pytest.mark.slow
def test_ddp_in_a_notebook(tmp_path: Path) -> None:
    done = execute("ddp_in_a_notebook", tmp_path)
    assert "2 ranks, 100 steps of 64 images" in done.printed
    assert done.number(r"(\S+)% of 2000 test images are correct") > 85
    assert "report.html" in done.printed
    assert done.number(r"(\d+) of 12 are correct") >= 9
    assert done.images == 1
    (page,) = done.pages
    assert "<iframe srcdoc=" in page
    assert "<!doctype html>" in unescape(page).lower()
    assert "model.net mlp is registered in this process only" in done.printed
    assert "my_parts.py, and give imports=['my_parts']" in done.printed
    assert done.number(r"my_parts.MLP: (\S+)%") > 70
    assert "2 ranks, 100 steps\n" in done.printed
    assert "counted 1001 of 1001 test images" in done.printed
    assert done.number(r"a plain sum counts (\d+)") > 1001
    on_ranks, in_kernel = done.number(r"on the ranks: (\S+)%"), done.number(r"in the kernel: (\S+)%")
    assert in_kernel == pytest.approx(on_ranks, abs=0.11)
    assert in_kernel > 75
    assert "`Accelerator` should only be initialized inside your training function" in done.printed


@pytest.mark.slow
def test_compare_and_doctor(tmp_path: Path) -> None:
    done = execute("compare_and_doctor", tmp_path)
    assert "equal: True\n" in done.printed
    assert re.findall(r"^LD\d+", done.printed, re.MULTILINE) == ["LD013"]
    assert "inpainting.py:" in done.printed
    assert "0 faults, exit code 0\n" in done.printed
    comparison, report = map(unescape, done.pages)
    assert "raw_ddp" in comparison
    assert "lightning" in comparison
    assert "LD013" in report
