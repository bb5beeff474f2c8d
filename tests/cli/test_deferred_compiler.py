"""torch's compiler is imported by what compiles, and then behaves as if it had been imported at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHILD_ENV, ROOT

# A module that is imported by the compiler alone.
EXECUTED = "torch._dynamo.eval_frame"

# What a program sees that asks torch's compiler before anything is compiled, and compiles afterwards.
COMPILES = """
import json, sys
if sys.argv[1] == "deferred":
    from lit_mnist.cli.torch_internals import defer_compiler
    defer_compiler()
import torch
from torch import nn
from torch._dynamo import OptimizedModule, disable, graph_break
from torch._dynamo.utils import get_optimize_ddp_mode, is_compile_supported

@torch.compiler.disable
def disabled(x):
    "A function that is excluded."
    return x + 1

@torch.compiler.disable(recursive=False)
def disabled_alone(x):
    return x + 2

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return model, torch.optim.Adam(model.parameters(), lr=0.1), torch.rand(8, 4)

def step(model, optimizer, x):
    optimizer.zero_grad()
    disabled_alone(disabled(model(x))).square().sum().backward()
    graph_break()
    optimizer.step()

seen = []
model, optimizer, x = make()
step(model, optimizer, x)
seen += [model[0].weight.tolist(), get_optimize_ddp_mode(), isinstance(model, OptimizedModule), graph_break()]
seen += [issubclass(nn.Module, OptimizedModule), disabled.__name__, disabled.__doc__, disabled(1), disabled_alone(1)]
state = optimizer.state_dict()
if sys.argv[1] == "deferred":
    assert "torch._dynamo.eval_frame" not in sys.modules
from torch._dynamo.testing import CompileCounter

counter = CompileCounter()
optimizer.load_state_dict(state)
torch.compile(step, backend=counter)(model, optimizer, x)
seen += [model[0].weight.tolist(), counter.frame_count, counter.op_count, dict(torch._dynamo.utils.counters["frames"])]
compiled = torch.compile(model, backend=counter)
seen += [isinstance(compiled, OptimizedModule), issubclass(type(compiled), OptimizedModule), get_optimize_ddp_mode()]
seen += [is_compile_supported("cpu"), OptimizedModule.__name__]
seen.append(isinstance(OptimizedModule(model, lambda f: f), nn.Module))
class Mine(OptimizedModule):
    pass
seen += [Mine.__mro__[1] is type(compiled), isinstance(compiled, Mine), disabled(1), disabled_alone(1)]
torch._dynamo.reset()
try:
    torch.compile(step, backend=counter, fullgraph=True)(model, optimizer, x)
except Exception as error:
    seen.append(type(error).__name__)
torch._dynamo.config.optimize_ddp = "python_reducer"
seen += [get_optimize_ddp_mode(), torch._dynamo.utils.get_optimize_ddp_mode()]
assert type(torch._dynamo) is type(torch._dynamo.utils) is type(torch._dynamo.trace_rules) is type(sys)
assert "_Finder" not in [type(finder).__name__ for finder in sys.meta_path]
print(json.dumps(seen))
"""

# Each use is the first one, in a process forked from one that has imported torch and made an optimizer.
FIRST_USES = """
import os, sys, threading
from lit_mnist.cli.torch_internals import defer_compiler
defer_compiler()
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
import torch._dynamo, torch._dynamo.utils
assert "torch._dynamo.eval_frame" not in sys.modules

def together():
    found = []
    threads = [threading.Thread(target=lambda: found.append(torch._dynamo.optimize)) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert len(found) == 8 and len(set(found)) == 1

def stays_set():
    torch._dynamo.graph_break = own = lambda: "own"
    assert torch._dynamo.graph_break is own and torch._dynamo.optimize

def fails():
    sys.modules["torch._dynamo.backends"] = None
    try:
        torch._dynamo.optimize
    except ImportError as error:
        os._exit("torch._dynamo.backends" not in str(error))
    os._exit(1)

def changes_config():
    torch._dynamo.config.suppress_errors = True
    import torch._dynamo.config as config
    assert config.suppress_errors is True

def star():
    names = {}
    exec("from torch._dynamo import *", names)
    assert names["optimize"]

uses = {
    "import of a submodule": lambda: __import__("torch._dynamo.config").relu,
    "submodule by name": lambda: exec("from torch._dynamo import config"),
    "attribute of utils": lambda: torch._dynamo.utils.counters,
    "attribute of trace_rules": lambda: torch._dynamo.trace_rules.lookup,
    "decorator": lambda: torch._dynamo.disable(torch.nn.Linear(1, 1)),
    "threads": together,
    "assignment": stays_set,
    "failure": fails,
    "config": changes_config,
    "star": star,
}
children = {}
for name, use in uses.items():
    if (child := os.fork()) == 0:
        use()
        executed = "torch._dynamo.eval_frame" in sys.modules
        whole = type(torch._dynamo) is type(torch._dynamo.utils) is type(sys)
        os._exit(not (executed and whole and torch.compile(len, backend="eager")("ab") == 2))
    children[child] = name
failed = [name for child, name in children.items() if os.waitpid(child, 0)[1]]
assert not failed, failed
"""


def run(program: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_compiled_does_not_change() -> None:
    """The answers, the weights, the number of graphs and of their operations are those without this file."""
    deferred, usual = (json.loads(run(COMPILES, how)) for how in ("deferred", "usual"))
    assert deferred == usual
    assert {"ddp_optimizer", "python_reducer"} <= {value for value in deferred if isinstance(value, str)}


def test_every_other_use_executes_the_whole_compiler() -> None:
    run(FIRST_USES)


@pytest.mark.parametrize(
    "program",
    [[str(ROOT / "train.py")], ["-m", "lit_mnist.engines.raw_ddp"], ["-m", "lit_mnist.engines.single"]],
    ids=["lightning", "raw_ddp", "single"],
)
def test_a_training_imports_no_compiler(program: list[str], tmp_path: Path) -> None:
    """Neither the launcher nor a rank executes it, from the start to a checkpoint, the test and the report.

    A module of an engine is imported before the compiler is deferred, so that one decorator in it would execute it.
    """
    options = (
        "--devices",
        "1" if program[-1].endswith("single") else "2",
        "--max-steps",
        "2",
        "--data.val_size",
        "100",
        "--data.test_size",
        "100",
    )
    command = [sys.executable, "-X", "importtime", *program, *options, "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=tmp_path, env=CHILD_ENV, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torch.optim" in done.stderr
    assert EXECUTED not in done.stderr
