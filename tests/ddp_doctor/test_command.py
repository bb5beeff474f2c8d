"""The command `doctor`: its help, its rejections and its files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHILD_ENV, ROOT, Program
from example_report import example

from ddp_doctor.checks import describe, load_checks
from ddp_doctor.command import program_of_doctor
from ddp_doctor.flags import help_of_doctor
from ddp_doctor.terminal import report_text

PROJECT = Path(__file__).parent / "projects" / "faulty" / "ld010_head_replaced.py"
REJECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing": ((), "What should be examined"),
    "two targets": (("a:b", "c:d"), "one target"),
    "a target and a command": (("a:b", "--", "torchrun", "x.py"), "Name one of"),
    "no colon": (("train.py",), "package.module:name"),
    "a misspelled flag": (("a:b", "--device", "2"), "--devices"),
    "a flag without a value": (("a:b", "--steps"), "needs a value"),
    "a flag twice": (("a:b", "--steps", "3", "--steps", "4"), "twice"),
    "a switch with a value": (("a:b", "--keep-output=x"), "takes no value"),
    "no number": (("a:b", "--steps", "x"), "whole number"),
    "too few ranks": (("a:b", "--devices", "1"), "at least 2"),
    "an unknown check": (("a:b", "--only", "LD99"), "no check LD99"),
    "an unknown check to explain": (("--explain", "LD00"), "no check LD00"),
    "no configuration": (("--config", "missing.yaml"), "no file"),
    "a file of another kind": ((str(ROOT / "README.md"),), "where file.py is a file of Python"),
    "a dot for the colon": (("a.b.Lit",), "did you mean a.b:Lit?"),
    "a script": (("train.py",), "torchrun"),
    "a folder for a file": (("a:b", "--html", "."), "cannot be written"),
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
def test_a_wrong_command_line_is_rejected(program: Program, name: str) -> None:
    words, said = REJECTED[name]
    done = program("doctor", *words)
    assert done.code == 2, done.out + done.err
    assert done.err.startswith("error: ")
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_every_check_explains_itself(program: Program) -> None:
    assert list(describe()) == list(load_checks())
    for code, check in describe().items():
        assert len(check.title.split()) <= 9, code
        done = program("doctor", "--explain", code.lower())
        assert done.code == 0
        assert check.title in done.out
        assert all(thread in done.out for thread in check.threads)


@pytest.mark.parametrize("words", [["--help"], ["--explain", "LD013"], ["a:b", "--bogus"]])
def test_help_and_rejections_import_no_torch(words: list[str]) -> None:
    script = "import sys; from lit_mnist.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", script, "doctor", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=CHILD_ENV, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_outer_launcher_is_rejected(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if name != "RANK" else "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    done = program("doctor", "a:b")
    assert done.code == 2, done.out + done.err
    assert "without a launcher" in done.err


def test_options_of_the_examined_code_are_its_own() -> None:
    assert help_of_doctor(["--help"], "p")
    assert not help_of_doctor(["a:b", "--args", "--help"], "p")
    assert not help_of_doctor(["--", "torchrun", "x.py", "--help"], "p")


@pytest.mark.parametrize(
    ("started", "shown"),
    [
        (["python", "-m", "lit_mnist.cli.main", "doctor", "a:b"], "python -m lit_mnist.cli.main doctor"),
        (["python", "train.py", "doctor", "a:b"], "python train.py doctor"),
        (["python", "/elsewhere/lit-mnist", "doctor", "a:b"], "/elsewhere/lit-mnist doctor"),
        (["python", "bin/lit-mnist", "doctor", "a:b"], "lit-mnist doctor"),
    ],
)
def test_the_hint_can_be_pasted(
    started: list[str], shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "bin" / "lit-mnist"
    script.parent.mkdir()
    script.touch(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(sys, "orig_argv", started)
    monkeypatch.setattr(sys, "argv", [started[1] if started[1] != "-m" else "main.py", *started[2:]])
    assert f"  more: {shown} --explain LD012" in report_text(example(), program_of_doctor()).splitlines()


@pytest.mark.timeout(200)
def test_an_interpreter_without_torch_is_named_with_that_of_the_doctor(tmp_path: Path, program: Program) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    other = tmp_path / "bare" / "bin" / "python"
    (program.folder / "train.py").write_text("import torch\n")
    done = program("doctor", "--", str(other), "train.py", timeout=150)
    assert done.code == 2, done.out + done.err
    assert all(str(path) in done.err for path in (other, sys.executable))
    assert f"-- {sys.executable} train.py" in done.err


@pytest.mark.timeout(200)
def test_the_report_is_written_as_text_json_and_page(program: Program) -> None:
    words = (f"{PROJECT}:main", "--only", "structural", "--json", "report.json", "--html", "report.html")
    done = program("doctor", *words, timeout=150)
    assert done.code == 1, done.out + done.err
    assert "with your rights" in done.out
    assert "LD010" in done.out
    report = json.loads((program.folder / "report.json").read_text())
    assert report["exit_code"] == 1
    assert [finding["code"] for finding in report["findings"] if finding["verdict"] == "fault"] == ["LD010"]
    assert all(describe()[code].structural for code in report["checks"])
    page = (program.folder / "report.html").read_text()
    assert "LD010" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.timeout(200)
def test_the_configuration_of_a_project_is_examined(program: Program) -> None:
    """The section `run` is of this project's own command; LightningCLI does not know it."""
    shutil.copytree(ROOT / "examples" / "user_module", program.folder, dirs_exist_ok=True)
    done = program("doctor", "--config", "spirals.yaml", "--only", "LD008,LD030", timeout=150)
    assert done.code == 0, done.out + done.err


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_fault_is_found_by_a_configuration(program: Program) -> None:
    shutil.copy(PROJECT.parent / "ld019b_only_frozen.py", program.folder / "mine.py")
    (program.folder / "mine.yaml").write_text("model: {class_path: mine.Module}\n")
    done = program("doctor", "--config", "mine.yaml", "--only", "LD019", timeout=150)
    assert done.code == 1, done.out + done.err
    assert "LD019" in done.out
