"""The recipes of docs/daily.md: a hook and an action, run as scripts in a repository with one fault."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from doctor_support import CHILD_ENV, ROOT

from ddp_doctor.command import parse
from ddp_doctor.errors import InputError

PAGE = (ROOT / "docs" / "daily.md").read_text()
HOOK, ACTION, *WORKFLOWS = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
sampler = DistributedSampler(data)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in DataLoader(data, 8, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
"""


def test_the_settings_of_the_page_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    section = tomllib.loads(text)["tool"]["ddp-doctor"]
    assert parse(["a:b"]).timeout == section["timeout"]


def test_the_commands_of_the_page_have_known_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"(?:^|entry: |run: )(ddp-doctor -.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        assert parse(shlex.split(command)[1:]).command[0] in {"torchrun", "$COMMAND"}
    with pytest.raises(InputError):
        parse(shlex.split(commands[0].replace("--", "--no-such-"))[1:])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["hook", "action"])
def test_a_recipe_finds_a_fault_and_its_line(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(sys.executable).parent), CHILD_ENV["PATH"]])
    environment = {**CHILD_ENV, "PATH": path, "GITHUB_WORKSPACE": str(tmp_path)}
    (hook,), (step,) = HOOK["repos"][0]["hooks"], ACTION["runs"]["steps"]
    command = hook["entry"]
    if recipe == "action":
        command, environment["COMMAND"] = step["run"], WORKFLOWS[0]["jobs"]["doctor"]["steps"][-1]["with"]["command"]
    done = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    line = SCRIPT.splitlines().index("    for x, y in DataLoader(data, 8, sampler=sampler):") + 1
    shown = f"::error file=train.py,line={line},title=LD001 " if recipe == "action" else f"at train.py:{line} in"
    assert shown in done.stdout
