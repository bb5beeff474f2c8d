"""The command `ddp-doctor`: its help, its rejections and its files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_support import CHILD_ENV, ROOT

from ddp_doctor.command import main
from ddp_doctor.faults import is_structural, load_checks
from ddp_doctor.findings import Report
from ddp_doctor.flags import parse
from ddp_doctor.output.formats import formatted

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
EXAMPLE = ("--", TORCHRUN, "--standalone", "--nproc-per-node", "2", str(ROOT / "examples" / "train.py"))
Capture = pytest.CaptureFixture[str]
# Words, and what the message names.
REJECTED = [
    ("", "Name one of a target"),
    ("train.py", "-- torchrun"),
    ("a:b c:d", "c:d"),
    ("a:b -- torchrun x.py", "Name one of"),
    ("a:b --device 2", "unrecognized arguments: --device 2"),
    ("a:b --steps", "--steps"),
    ("a:b --verbose=x", "--verbose"),
    ("a:b --steps x", "--steps"),
    ("a:b --devices 1", "devices must be at least 2"),
    ("a:b --only LD99", "LD99"),
    ("a:b --only ,", "no check"),
    ("a:b --only LD001 --skip LD001", "No check is left"),
    ("--explain LD00", "LD00"),
    ("--data a:b -- x", "--data"),
    ("a:b --html .", "--html"),
    ("a:b --json missing/report.json", "--json"),
    ("a:b --format markdown --before broken.py", "--before broken.py is no report of --json"),
    ("a:b --before report.json", "--before belongs to --format markdown"),
    ("missing_module:main", "no missing_module"),
    ("missing.py:main", "no missing.py"),
    ("-- missing-command", "no command missing-command"),
    ("options.py:main", "ddp-doctor -- torchrun --nproc-per-node 2 options.py"),
]


@pytest.mark.parametrize(("words", "said"), REJECTED)
def test_a_wrong_request_is_rejected_in_one_line(words: str, said: str, capsys: Capture) -> None:
    Path("report.json").write_text(formatted(Report("a:b", 2), "json"))
    Path("broken.py").touch()
    Path("options.py").write_text("import argparse\nargparse.ArgumentParser(exit_on_error=True).parse_args(['-x'])\n")
    code, told = main(words.split()), capsys.readouterr().err
    assert (code, told[:7], told.count("\n")) == (2, "error: ", 1), told
    assert said in told


def test_an_outer_launcher_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["a:b"]) == 2
    assert "without a launcher" in capsys.readouterr().err


def test_every_check_explains_itself(capsys: Capture) -> None:
    for code, check in load_checks().items():
        assert len(check.TITLE.split()) <= 9
        assert main(["--explain", code.lower()]) == 0
        told = capsys.readouterr().out
        assert all(part in told for part in (check.TITLE, *check.THREADS, *check.WRONG.splitlines()))


@pytest.mark.parametrize(
    "words",
    ["-m ddp_doctor --help", "-m ddp_doctor --explain LD013", "-m ddp_doctor a:b --bogus", "-c import\tddp_doctor"],
)
def test_help_and_wrong_flags_import_no_torch(words: str) -> None:
    command = [sys.executable, "-X", "importtime", *words.split(" ")]
    done = subprocess.run(command, capture_output=True, text=True, env=CHILD_ENV, timeout=250, check=False)
    assert done.returncode == (2 if "--bogus" in words else 0), done.stderr
    assert not re.search(r"\| *(torch|lightning|numpy)$", done.stderr, re.MULTILINE)


def test_no_module_needs_lightning() -> None:
    """Except `lightning_rank`, which runs a LightningModule."""
    script = (
        "import importlib, pathlib, pkgutil, sys, ddp_doctor\n"
        "sys.modules.update(lightning=None, accelerate=None, transformers=None)\n"
        "for module in pkgutil.walk_packages(ddp_doctor.__path__, 'ddp_doctor.'):\n"
        "    if not module.name.endswith(('lightning_rank', '__main__')):\n"
        "        importlib.import_module(module.name)\n"
    )
    subprocess.run([sys.executable, "-c", script], env=CHILD_ENV, timeout=250, check=True)


def test_options_of_the_examined_code_are_its_own() -> None:
    assert parse(["a:b", "--devices", "3", "--args", "x", "--help"]).args == ["x", "--help"]
    assert parse(["--", "torchrun", "x.py", "--help"]).command == ["torchrun", "x.py", "--help"]


def test_the_report_is_written_as_text_json_and_page(capsys: Capture) -> None:
    code = main(["--only", "structural", "--json", "report.json", "--html", "report.html", *EXAMPLE])
    told, report = capsys.readouterr().out, json.loads(Path("report.json").read_text())
    stages = [line.removeprefix("stage: ") for line in told.splitlines() if line.startswith("stage: ")]
    assert stages == ["several ranks", "one process", "checks"]
    assert code == report["exit_code"] == 1
    assert [finding["code"] for finding in report["findings"] if finding["verdict"] == "fault"] == ["LD001"]
    assert all(is_structural(load_checks()[check["code"]]) for check in report["checks"])
    assert all("LD001" in text for text in (told, Path("report.html").read_text()))


def test_a_command_that_trains_nothing_is_rejected(capsys: Capture) -> None:
    Path("evaluate.py").write_text("print('done')")
    assert main(["--", "python", "evaluate.py"]) == 2
    assert "has trained" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_baseline_accepts_what_was_found(capsys: Capture) -> None:
    flags = ["--only", "LD001", "--format", "github", "--baseline", "new.json", "--write-baseline", "new.json"]
    assert main([*flags, *EXAMPLE]) == 0
    assert "LD001" in Path("new.json").read_text()
    assert capsys.readouterr().out.startswith("No fault found, 1 accepted")
