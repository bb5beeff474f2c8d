"""The command `ddp-doctor`: its help, its rejections and its files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_support import CHILD_ENV, ROOT, Done
from example_report import example

from ddp_doctor.command import main, parse, program
from ddp_doctor.faults import describe, load_checks
from ddp_doctor.output.terminal import report_text
from ddp_doctor.request import check_request
from ddp_doctor.versions import VERSION

PROJECT = Path(__file__).parent / "projects" / "faulty" / "ld010_head_replaced.py"
Doctor = Callable[..., Done]
REJECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "What should be examined"),
    "two targets": (("a:b", "c:d"), "one target"),
    "a target and a command": (("a:b", "--", "torchrun", "x.py"), "Name one of"),
    "no colon": (("train.py",), "package.module:name"),
    "a misspelled flag": (("a:b", "--device", "2"), "--devices"),
    "a flag without a value": (("a:b", "--steps"), "expected one argument"),
    "a flag twice": (("a:b", "--steps", "3", "--steps", "4"), "twice"),
    "a switch with a value": (("a:b", "--keep-output=x"), "ignored explicit argument"),
    "no number": (("a:b", "--steps", "x"), "invalid int value"),
    "too few ranks": (("a:b", "--devices", "1"), "at least 2"),
    "an unknown check": (("a:b", "--only", "LD99"), "no check LD99"),
    "an unknown check to explain": (("--explain", "LD00"), "no check LD00"),
    "no configuration": (("--config", "missing.yaml"), "no file"),
    "a file of another kind": ((str(ROOT / "README.md"),), "where file.py is a file of Python"),
    "a dot for the colon": (("a.b.Lit",), "did you mean a.b:Lit?"),
    "a script": (("train.py",), "torchrun"),
    "a folder for a file": (("a:b", "--html", "."), "a folder, not a file"),
    "no dashes before the command": (
        ("--devices", "2", "torchrun", "train.py"),
        "ddp-doctor --devices 2 -- torchrun train.py",
    ),
    "a script that is not there": (
        ("--", "torchrun", "--nproc-per-node", "2", "nosuch.py"),
        "There is no file nosuch.py.",
    ),
    "no number of ranks": (
        ("--", "torchrun", "--nproc-per-node", "abc", "x.py"),
        "a number of ranks from 1, but is abc",
    ),
    "no ranks": (("--", "torchrun", "--nproc_per_node=0", "x.py"), "a number of ranks from 1, but is 0"),
    "a launcher without a script": (("--", "torchrun", "--nproc-per-node", "2"), "torchrun needs a script"),
    "a launcher alone": (("--", "torchrun"), "torchrun needs a script"),
    "a folder as a script": (("--", "torchrun", "--nproc-per-node", "2", "."), "is a folder, not a script"),
    "a name that is too long": ((f"{'x' * 300}.py:main",), "There is no file xxx"),
    "a report with a name that is too long": (("a:b", "--json", "x" * 300), "File name too long"),
    "a number of no check": (("a:b", "--only", "LD999"), "the checks are LD001 to LD036"),
    "one file twice": (("a:b", "--json", "r", "--html", "r"), "same file"),
    "no codes": (("a:b", "--only", ","), "needs a code"),
    "no check is left": (("a:b", "--only", "LD001", "--skip", "LD001"), "No check is left"),
    "no folder": (("a:b", "--json", "missing/report.json"), "no folder"),
    "data of a command": (("--data", "a:b", "--", "x"), "LightningModule"),
    "no module": (("missing_module:main",), "There is no module missing_module"),
    "no file": (("missing.py:main",), "There is no file missing.py"),
    "no command": (("--", "missing-command"), "no command missing-command"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_wrong_command_line_is_rejected(doctor: Doctor, name: str) -> None:
    words, said = REJECTED[name]
    done = doctor(*words)
    assert done.code == 2, done.out + done.err
    assert done.err.startswith("error: ")
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_script_that_reads_its_options_while_it_is_imported_is_rejected(doctor: Doctor, tmp_path: Path) -> None:
    script = tmp_path / "own_options.py"
    script.write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--data', required=True)\n"
        "parser.parse_args()\n"
        "def main(): ...\n"
    )
    done = doctor(f"{script}:main")
    assert done.code == 2, done.out + done.err
    assert f"ddp-doctor -- torchrun --nproc-per-node 2 {script}" in done.err


@pytest.mark.parametrize("words", [["auto", "mine.py"], ["npu", "mine.py"], ["2", "mine.py", "--nproc-per-node", "0"]])
def test_a_right_number_of_ranks_is_accepted(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including an option of the script that has the same name."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("print()\n")
    check_request(parse(["--", "torchrun", "--nproc-per-node", *words]))


def test_a_script_that_cannot_be_compiled_is_rejected_at_once(doctor: Doctor) -> None:
    Path("mine.py").write_text("import torch\n\ndef main(:\n")
    done = doctor("--", "torchrun", "--nproc-per-node", "2", "mine.py")
    assert done.code == 2, done.out + done.err
    assert done.err == "error: mine.py, line 3: invalid syntax. The script cannot be compiled.\n"
    assert "stage" not in done.out


def test_every_check_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert {code: check.CODE for code, check in load_checks().items()} == {code: code for code in describe()}
    assert list(describe()) == [f"LD{number:03}" for number in range(1, len(describe()) + 1)]
    for code, check in describe().items():
        assert len(check.title.split()) <= 9, code
        assert main(["--explain", code.lower()]) == 0
        told = capsys.readouterr().out
        assert check.title in told
        assert all(thread in told for thread in check.threads)
        assert all(line in told for line in check.wrong.splitlines())


@pytest.mark.parametrize("words", [["--help"], ["--explain", "LD013"], ["a:b", "--bogus"]])
def test_help_and_rejections_import_no_torch(words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ddp_doctor", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=CHILD_ENV, timeout=60, check=False)
    assert done.returncode == (2 if "--bogus" in words else 0), done.stderr
    assert not re.search(r"\| *(torch|lightning|numpy)$", done.stderr, re.MULTILINE)


def test_importing_the_package_imports_no_library() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import ddp_doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=CHILD_ENV, timeout=60, check=True)
    assert not re.search(r"\| *(torch|lightning|jinja2|numpy)\b", done.stderr)


def test_no_module_needs_lightning() -> None:
    """Except `lightning_rank`, which runs a LightningModule, and the callback of the watch."""
    script = (
        "import importlib, pathlib, pkgutil, sys, ddp_doctor\n"
        "sys.modules.update(lightning=None, accelerate=None, transformers=None)\n"
        "for module in pkgutil.walk_packages(ddp_doctor.__path__, 'ddp_doctor.'):\n"
        "    if not module.name.endswith(('lightning_rank', 'watch.callback', '__main__')):\n"
        "        importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", script], env=CHILD_ENV, timeout=60, check=True)


def test_the_command_has_its_own_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--explain", "LD012"]) == 0
    assert "Batch norm depends" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddp-doctor {VERSION}\n"


def test_an_outer_launcher_is_rejected(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if name != "RANK" else "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    done = doctor("a:b")
    assert done.code == 2, done.out + done.err
    assert "without a launcher" in done.err


def test_options_of_the_examined_code_are_its_own() -> None:
    assert parse(["--help"]).help
    assert parse(["a:b", "--args=x", "--help", "--"]).args == ["x", "--help", "--"]
    assert parse(["--", "torchrun", "x.py", "--help"]).command == ["torchrun", "x.py", "--help"]


@pytest.mark.parametrize(
    ("started", "on_path", "shown"),
    [
        ("/elsewhere/train.py", True, "ddp-doctor"),
        ("/elsewhere/train.py", False, "ddp-doctor"),
        ("/elsewhere/ddp-doctor", False, "/elsewhere/ddp-doctor"),
        ("/elsewhere/ddp-doctor", True, "ddp-doctor"),
    ],
)
def test_the_hint_can_be_pasted(
    started: str, on_path: bool, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if on_path:
        (tmp_path / "ddp-doctor").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [started])
    assert f"  more: {shown} --explain LD012" in report_text(example(), program()).splitlines()


@pytest.mark.timeout(200)
def test_an_interpreter_without_torch_is_named_with_that_of_the_doctor(tmp_path: Path, doctor: Doctor) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    other = tmp_path / "bare" / "bin" / "python"
    (tmp_path / "train.py").write_text("import torch\n")
    done = doctor("--", str(other), "train.py", timeout=150)
    assert done.code == 2, done.out + done.err
    assert all(str(path) in done.err for path in (other, sys.executable))
    assert f"-- {sys.executable} train.py" in done.err


@pytest.mark.timeout(200)
def test_the_report_is_written_as_text_json_and_page(doctor: Doctor) -> None:
    words = (f"{PROJECT}:main", "--only", "structural", "--json", "report.json", "--html", "report.html")
    done = doctor(*words, timeout=150)
    assert done.code == 1, done.out + done.err
    assert "with your permissions" in done.out
    told = [line.split("  ")[:2] for line in done.out.splitlines() if line.startswith("stage ")]
    assert told == [["stage 1/3", "one process"], ["stage 2/3", "several ranks"], ["stage 3/3", "checks"]]
    assert "LD010" in done.out
    report = json.loads(Path("report.json").read_text())
    assert report["exit_code"] == 1
    assert [finding["code"] for finding in report["findings"] if finding["verdict"] == "fault"] == ["LD010"]
    assert all(describe()[check["code"]].structural for check in report["checks"])
    page = Path("report.html").read_text()
    assert "LD010" in page
    assert "<script" not in page
    assert "http" not in re.sub(r'http-equiv|<a href="[^"]*"', "", page)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_fault_is_found_by_a_configuration(doctor: Doctor) -> None:
    shutil.copy(PROJECT.parent / "ld019b_only_frozen.py", "mine.py")
    Path("mine.yaml").write_text("model: {class_path: mine.Module}\n")
    done = doctor("--config", "mine.yaml", "--only", "LD019", timeout=150)
    assert done.code == 1, done.out + done.err
    assert "LD019" in done.out
