"""`examples/ddp.py` trains what `raw_ddp` trains, bit for bit, and evaluates each test sample once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHILD_ENV, ROOT, TIMEOUT, Program, result_of

from lit_mnist.checkpoint.digest import weights_sha256

FILE = ROOT / "examples" / "ddp.py"
FLAGS = ("--max-steps", "15")


def run(*words: object, torchrun: int = 0) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)] if torchrun else []
    command = [sys.executable, *launcher, str(FILE), *map(str, words), *FLAGS, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT, env=CHILD_ENV, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = Program(tmp_path_factory.mktemp("raw_ddp"))

    @cache
    def of(ranks: int) -> dict[str, Any]:
        words = ("--devices", ranks, *FLAGS, "--precision", "32-true", "--run.threads", 1)
        return result_of(program.train(*words, engine="raw_ddp"))

    return of


@pytest.mark.parametrize(
    ("ranks", "torchrun"), [*(pytest.param(ranks, False, marks=pytest.mark.slow) for ranks in (1, 2)), (2, True)]
)
@pytest.mark.usefixtures("forked_python")
def test_it_trains_the_weights_of_raw_ddp(result: Any, tmp_path: Path, ranks: int, torchrun: bool) -> None:
    file = tmp_path / "ddp.pt"
    shown = run("--save", file, torchrun=ranks) if torchrun else run("--save", file, "--devices", ranks)
    expected = result(ranks)
    # Only rank 0 prints.
    assert re.findall(r"weights_sha256 (\w+)", shown) == [expected["weights_sha256"]]
    assert weights_sha256(torch.load(file, weights_only=True)) == expected["weights_sha256"]
    test = expected["test"]
    assert f"test accuracy {test['accuracy']:.2%}, loss {test['loss']:.4f}" in shown


def test_it_imports_torch_and_the_standard_library_only() -> None:
    nodes = list(ast.walk(ast.parse(FILE.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}
