"""`ddp-doctor --read`: each pattern finds its fault, and is silent in the nearest healthy program; nothing is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_doctor.command import main
from ddp_doctor.source.reading import read

HEAD = """\
import numpy as np, torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
LOOP = """
def main(net, data, rank):
    dist.init_process_group("gloo")
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, sampler=sampler, num_workers=2)
    total = 0.0
    for epoch in range(9):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        if rank == 0:
            torch.save(net.state_dict(), "last.pt")
    dist.destroy_process_group()


main(nn.Linear(2, 2), [], 0)
"""
SCALED = """\
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1)
            scaler.step(optimizer)
"""
NET = """
class Net(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5%s)

def evaluate(net):
    net.eval()
"""
# The lines of a loop that are healthy, or a text before it, and what stands in their place in the faulty program.
ROWS = [
    ("LD001", "        sampler.set_epoch(epoch)\n", ""),
    ("LD018", SCALED, SCALED.replace("            scaler.unscale_(optimizer)\n", "")),
    ("LD020", "            optimizer.zero_grad()\n", ""),
    ("LD022", NET % ", self.training", NET % ""),
    ("LD031", "total += loss.item()", "total += loss"),
]


@pytest.mark.parametrize(("code", "healthy", "faulty"), ROWS)
def test_a_pattern_finds_its_fault_and_no_other(code: str, healthy: str, faulty: str) -> None:
    if healthy in LOOP:
        texts = LOOP, LOOP.replace(healthy, faulty)
    elif "backward" in healthy:
        steps = "            loss.backward()\n            optimizer.step()\n"
        texts = LOOP.replace(steps, healthy), LOOP.replace(steps, faulty)
    else:
        texts = healthy + LOOP, faulty + LOOP
    found = []
    for text in texts:
        Path("train.py").write_text(HEAD + text)
        found.append([finding.code for finding in read(["train.py"]).findings])
    assert found == [[], [code]]


def test_what_a_program_imports_from_its_project_is_read_and_aliases_are_resolved() -> None:
    Path("pyproject.toml").touch()
    Path("mine").mkdir()
    Path("mine/loop.py").write_text(HEAD + LOOP.replace("optimizer.zero_grad()", "clear(optimizer)"))
    Path("run.py").write_text("from mine import loop, tools")
    Path("mine/tools.py").write_text("def clear(optimizer):\n    optimizer.zero_grad()")
    assert not read(["run.py"]).findings
    Path("mine/tools.py").write_text("def clear(optimizer):\n    pass")
    found = read(["run.py"]).findings
    assert [(one.code, one.place) for one in found] == [("LD020", "mine/loop.py:21 in main")]


def test_the_command_answers_without_torch_and_with_the_exit_codes_of_linters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("train.py").write_text(HEAD + LOOP.replace("optimizer.zero_grad()", "pass"))
    code = "import sys; from ddp_doctor.command import main; main(['--read', '.']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert main(["--read", "train.py", "--format", "sarif"]) == 1
    result = json.loads(capsys.readouterr().out)["runs"][0]["results"][0]
    assert (result["ruleId"], result["locations"][0]["physicalLocation"]["region"]["startLine"]) == ("LD020", 21)
    assert [main(["--read", "train.py", f"--{name}=base.json"]) for name in ("write-baseline", "baseline")] == [0, 0]
    text = HEAD + LOOP.replace("optimizer.zero_grad()", "pass")
    Path("train.py").write_text(
        text.replace("optimizer.step()", "optimizer.step()  # ddp-doctor: ignore[LD020] one step")
    )
    assert main(["--read", "."]) == 0
    assert main(["--read", "none.py"]) == 2
    Path("train.py").write_text("def")
    assert main(["--read", "train.py"]) == 2


@pytest.mark.parametrize(
    "line", ["import lightning", "from accelerate import Accelerator", "from transformers import Trainer"]
)
def test_what_a_framework_does_is_no_finding(line: str) -> None:
    Path("train.py").write_text(f"{line}\n{HEAD}" + LOOP.replace("        sampler.set_epoch(epoch)\n", ""))
    assert not read(["train.py"]).findings
