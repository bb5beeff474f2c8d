"""The pages of the documentation: their commands, settings, recipes and example do what they say."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import suite
import yaml
from doctor_support import CHILD_ENV, ROOT

from ddp_doctor.faults import load_checks
from ddp_doctor.flags import parse

DAILY = (ROOT / "docs" / "daily.md").read_text()
_, HOOK, ACTION, *WORKFLOWS = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", DAILY, re.DOTALL))
BIN = Path(sys.executable).parent


def test_the_checks_of_the_guide_are_those_of_the_package() -> None:
    assert suite.checks_table() in suite.GUIDE.read_text()


def test_the_settings_of_the_page_are_valid() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", DAILY, re.DOTALL)
    Path("pyproject.toml").write_text(text)
    assert parse(["a:b"]).timeout == tomllib.loads(text)["tool"]["ddp-doctor"]["timeout"]


def test_the_commands_of_the_pages_have_known_flags() -> None:
    pages = DAILY + suite.GUIDE.read_text() + (ROOT / "README.md").read_text()
    commands = re.findall(r"(?:^|entry: |run: )ddp-doctor (?!watch|--read$)([^\n`>|#]*)", pages, re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        parse(shlex.split(command))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["hook", "action"])
def test_a_recipe_finds_the_fault_of_the_example_and_its_line(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "train.py").write_text((ROOT / "examples" / "train.py").read_text())
    path = os.pathsep.join([str(BIN), CHILD_ENV["PATH"]])
    environment = {**CHILD_ENV, "PATH": path, "GITHUB_WORKSPACE": str(tmp_path)}
    (hook,), (step,) = HOOK["repos"][0]["hooks"], ACTION["runs"]["steps"]
    command, shown = hook["entry"], "at train.py:19 in main"
    if recipe == "action":
        command, shown = step["run"], "::error file=train.py,line=19,title=LD001 "
        environment["COMMAND"] = WORKFLOWS[0]["jobs"]["doctor"]["steps"][-1]["with"]["command"]
    words = ["bash", "-e", "-c", command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert shown in done.stdout


@pytest.mark.slow
def test_the_guide_shows_the_findings_of_its_example(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddp_doctor import examine

    monkeypatch.chdir(ROOT / "examples")
    command = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "train.py")
    report = examine(command=command, timeout=200)
    assert [finding.code for finding in report.findings] == ["LD001", "LD014", "LD012"]
    page = suite.GUIDE.read_text()
    for finding in report.findings:
        assert f"{finding.code} {load_checks()[finding.code].TITLE} ({finding.verdict.value})" in page
        assert f"at {finding.place}\n" in page
