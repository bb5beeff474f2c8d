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
from doctor_support import CHILD_ENV, Done

from ddp_doctor.command import main, parse
from ddp_doctor.faults import describe, load_checks
from ddp_doctor.versions import VERSION

PROJECT = Path(__file__).parent / "projects" / "faulty" / "ld010_head_replaced.py"
Doctor = Callable[..., Done]
REJECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "What should be examined"),
    "no colon": (("train.py",), "package.module:name"),
    "two targets": (("a:b", "c:d"), "unrecognized arguments: c:d"),
    "a target and a command": (("a:b", "--", "torchrun", "x.py"), "Name one of"),
    "a misspelled flag": (("a:b", "--device", "2"), "--devices"),
    "a flag without a value": (("a:b", "--steps"), "expected one argument"),
    "a switch with a value": (("a:b", "--keep-output=x"), "ignored explicit argument"),
    "no number": (("a:b", "--steps", "x"), "invalid int value"),
    "too few ranks": (("a:b", "--devices", "1"), "at least 2"),
    "an unknown check": (("a:b", "--only", "LD99"), "no check LD99: they are LD001 to LD036"),
    "an unknown check to explain": (("--explain", "LD00"), "no check LD00"),
    "no configuration": (("--config", "missing.yaml"), "There is no file missing.yaml"),
    "a script": (("train.py",), "torchrun"),
    "no check is left": (("a:b", "--only", "LD001", "--skip", "LD001"), "No check is left"),
    "data of a command": (("--data", "a:b", "--", "x"), "LightningModule"),
    "a folder for a file": (("a:b", "--html", "."), "cannot be written"),
    "no folder": (("a:b", "--json", "missing/report.json"), "cannot be written"),
    "no codes": (("a:b", "--only", ","), "there is no check"),
    "a script that is not there": (("--", "torchrun", "nosuch.py"), "No such file or directory: 'nosuch.py'"),
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


def test_a_script_that_cannot_be_compiled_is_rejected_at_once(doctor: Doctor) -> None:
    Path("mine.py").write_text("import torch\n\ndef main(:\n")
    done = doctor("--", "torchrun", "--nproc-per-node", "2", "mine.py")
    assert done.code == 2, done.out + done.err
    assert done.err == "error: mine.py cannot be run: invalid syntax (mine.py, line 3)\n"


@pytest.mark.slow
def test_what_a_launcher_rejects_is_said_in_its_own_words(doctor: Doctor) -> None:
    Path("mine.py").write_text("print()\n")
    done = doctor("--", "torchrun", "--nproc-per-node", "abc", "mine.py")
    assert done.code == 2, done.out + done.err
    assert "Unsupported nproc_per_node value: abc" in done.out


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
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ddp-doctor {VERSION}\n"


def test_an_outer_launcher_is_rejected(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if name != "RANK" else "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    done = doctor("a:b")
    assert done.code == 2, done.out + done.err
    assert "without a launcher" in done.err


def test_options_of_the_examined_code_are_its_own() -> None:
    assert parse(["a:b", "--args=x", "--help", "--"]).args == ["x", "--help", "--"]
    assert parse(["--", "torchrun", "x.py", "--help"]).command == ["torchrun", "x.py", "--help"]


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
